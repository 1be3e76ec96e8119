"""What must hold of every run, whatever happened in it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from eventbus.cursor import RESERVE
from tests.chaos.scenario import EVENTS, HANGING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eventbus import SubscriberStats
    from tests.chaos.runner import Publication, Record
    from tests.chaos.subscribers import Book

__all__ = ["judge"]

#: Reasons that mean: it was waiting, or running, when somebody ended it.
_ENDED = ("closed", "unsubscribed", "disabled")
#: Threads that may hang before events are dropped for want of one.
_MOST_ABANDONED = 16


def judge(record: Record) -> list[str]:
    """Everything that is wrong with a run."""
    faults = list(record.faults)
    faults += _numbers(record)
    faults += _flushed(record)
    faults += _journaled(record)
    for book in record.books:
        if book.subscription is not None or book.spec.name in record.stats:
            found = [*book.faults, *_Verdict(record, book).faults()]
            faults += [f"{book.spec.name}: {fault}" for fault in found]
            if found:
                faults.append(f"{book.spec.name} is {book.spec}, in the end {record.later[book.spec.name]}")
    return faults


def _numbers(record: Record) -> Iterator[str]:
    """Every event has one number, the same for everybody, and a thread's events have growing ones."""
    by_seq: dict[int, tuple[int, int, str]] = {}
    for book in record.books:
        for seq, who, n, hook in book.calls:
            if by_seq.setdefault(seq, (who, n, hook)) != (who, n, hook):
                yield f"{book.spec.name}: number {seq} is both {by_seq[seq]} and {(who, n, hook)}"
    threads = len(record.scenario.publishing)
    last = dict.fromkeys(range(threads), -1)
    for _, (who, n, _hook) in sorted(by_seq.items()):
        if who in last:
            if n <= last[who]:
                yield f"event {n} of thread {who} has a later number than its event {last[who]}"
            last[who] = n
    of_ours = Counter((who, n) for who, n, hook in by_seq.values() if hook in EVENTS)
    twice = [event for event, times in of_ours.items() if times > 1]
    if twice:
        yield f"events with two numbers: {twice[:5]}"


def _flushed(record: Record) -> Iterator[str]:
    """After a flush that was complete nothing is left, unless it was published meanwhile."""
    life = record.lives[0]
    if record.flushed is False and record.scenario.is_benign:
        yield "a flush was not complete, though nobody holds up anything"
    if record.flushed and len(record.lives) == 1 and life.report is not None and record.scenario.close_at is None:
        late = any(p.ended > life.closing for p in record.publications)
        if life.report.left and not late and not any(b.spec.behaviour == "publishes" for b in record.books):
            yield f"after a complete flush the close left {life.report.left}"


def _journaled(record: Record) -> Iterator[str]:
    """Everything that was published while the bus was open is in the journal, once and in order.

    But for what every durable subscriber is past, which may be removed from the beginning.
    """
    if not record.scenario.journal:
        return
    seqs = [seq for seq, _ in record.journal]
    if seqs != sorted(set(seqs)):
        yield "the journal repeats events, or has them out of order"
    durable = any(book.spec.durable and book.opened for book in record.books)
    first = seqs[0] if seqs and durable else 0
    number = {(who, n): seq for book in record.books for seq, who, n, _ in book.calls}
    kept = {(event.who, event.n) for _, event in record.journal if event.hook in EVENTS}
    missing = [
        (p.who, p.n)
        for p in record.publications
        if not p.raised
        and (p.who, p.n) not in kept
        and number.get((p.who, p.n), 0) >= first
        and any(life.opened <= p.began and p.ended < life.closing for life in record.lives)
    ]
    if missing and (seqs or not durable):
        yield f"the journal lacks {len(missing)} events: {missing[:5]}"


class _Verdict:
    """What one subscriber was told, against what was published for it."""

    def __init__(self, record: Record, book: Book) -> None:
        self._record = record
        self._book = book
        self._spec = book.spec
        self._stats = record.stats[book.spec.name]
        self._later = record.later[book.spec.name]
        self._seen = {seq: (who, n) for seq, who, n, hook in book.calls if hook in EVENTS}
        self._certain = [p for p in record.publications if self._is_certain(p)]
        self._possible = [p for p in record.publications if self._is_possible(p)]

    def faults(self) -> Iterator[str]:
        yield from self._balance("after the close", self._stats)
        yield from self._balance("in the end", self._later)
        if self._later.pending:
            yield f"{self._later.pending} are pending in the end"
        if self._book.is_muddled:
            return
        yield from self._nothing_twice()
        yield from self._only_what_it_may()
        yield from self._as_many_as_it_must()
        yield from self._nothing_missing()
        yield from self._the_right_reasons()
        yield from self._as_it_counted_itself()
        yield from self._one_at_a_time()
        yield from self._sink_calls()

    # -------------------------------------------------------------------------------------- what was meant for it

    def _is_certain(self, p: Publication) -> bool:
        """Whether it was published after the call that subscribed, before any that closed, while the bus was open."""
        if p.raised or p.hook not in self._book.opened or p.began <= self._book.opened[p.hook][1]:
            return False
        ends = [began for began, _ in self._book.closed] + self._book.gone
        if ends and p.ended >= min(ends):
            return False
        return any(life.opened <= p.began and p.ended < life.closing for life in self._record.lives)

    def _is_possible(self, p: Publication) -> bool:
        """Whether some of its publish fell between the call that subscribed and the end of the one that closed."""
        if p.hook not in self._book.opened or p.ended < self._book.opened[p.hook][0]:
            return False
        if self._book.closed and p.began > max(ended for _, ended in self._book.closed):
            return False
        return any(life.opening <= p.ended and p.began <= life.closed for life in self._record.lives)

    def _admitted(self, published: list[Publication]) -> list[Publication]:
        """Those that its `when` lets through, or fails at."""
        return [p for p in published if self._spec.when != "even" or p.n % 2 == 0]

    # ------------------------------------------------------------------------------------------------- the checks

    def _balance(self, when: str, stats: SubscriberStats) -> Iterator[str]:
        settled = stats.delivered + stats.failed + stats.timed_out + stats.dropped
        if stats.matched != settled + stats.pending or sum(stats.dropped_by.values()) != stats.dropped:
            yield f"the counts do not balance {when}: {stats}"

    def _nothing_twice(self) -> Iterator[str]:
        """Numbers grow from call to call; only a retry repeats one. Inline, each thread has an order of its own."""
        if self._spec.kind == "inline":
            events = list(self._book.calls)
            if len(events) != len(set(events)):
                yield "it got an event twice"
            return
        if self._spec.durable and self._later.dropped_by.get("closed"):
            return  # what a start had in hand comes again at the next
        if self._may_have_died():
            return  # an event that a child began, and could not say so, is sent again
        last, times = 0, 0
        attempts = self._spec.retries + 1
        batches = self._spec.kind == "sink"
        for seq, *_ in self._book.calls:
            times = times + 1 if seq == last else 1
            if seq < last and not batches:
                yield f"event {seq} came after {last}"
            if times > attempts and not batches:
                yield f"event {seq} came {times} times"
            last = seq
        if batches and self._spec.behaviour not in ("raises", "unavailable", "hangs", "odd"):
            seqs = [seq for seq, *_ in self._book.calls]
            if seqs != sorted(set(seqs)):
                yield "its batches repeat events, or are out of order"

    def _only_what_it_may(self) -> Iterator[str]:
        possible = {(p.who, p.n) for p in self._possible}
        strange = [event for event in self._seen.values() if event not in possible]
        if strange:
            yield f"it got what was not for it (thread, number): {strange[:5]}"

    def _as_many_as_it_must(self) -> Iterator[str]:
        if not self._spec.hooks:  # it also hears what the bus says about itself
            least, most = self._bounds(self._certain)[0], float("inf")
        else:
            least, most = self._bounds(self._certain)[0], self._bounds(self._possible)[1]
        if self._spec.durable:  # what was dropped at a close is matched, and judged, again
            most += self._later.dropped_by.get("closed", 0) + len(self._book.misjudged)
            if self._spec.every > 1:  # and counted off again
                return
        if not least <= self._later.matched <= most:
            yield f"matched {self._later.matched} events, not from {least} to {most}"

    def _bounds(self, published: list[Publication]) -> tuple[int, int]:
        by_hook = Counter(p.hook for p in self._admitted(published))
        count = sum(number // self._spec.every for number in by_hook.values())
        if self._spec.every > 1 and self._spec.when == "raises":  # those that fail at `when` are not counted off
            count = 0 if published is self._certain else sum(by_hook.values())
        if self._spec.once and self._spec.when != "raises":
            count = min(count, 1)
        elif self._spec.once:
            count = 0 if published is self._certain else count
        return count, count

    def _nothing_missing(self) -> Iterator[str]:
        """What it never saw is accounted for as dropped, or as failed or timed out before a sink was asked."""
        if self._spec.every > 1 or self._spec.once:
            return
        seen = set(self._seen.values())
        fails = self._spec.when == "raises"
        must = [p for p in self._admitted(self._certain) if not (fails and p.n % 5 == 0)]
        missing = [(p.who, p.n) for p in must if (p.who, p.n) not in seen]
        excused = self._later.dropped
        if self._spec.durable and not self._book.closed:  # the last start delivered what a close had left, if it ended
            last = self._record.lives[-1].report
            if last is None or not last.ok:
                return
            excused -= self._later.dropped_by.get("closed", 0)
        if self._spec.kind in ("sink", "process"):
            excused += self._later.failed + self._later.timed_out
        if len(missing) > excused:
            yield f"it never got {len(missing)} events, of which {excused} are accounted for: {missing[:5]}"

    def _the_right_reasons(self) -> Iterator[str]:
        spec, stats = self._spec, self._later
        allowed = {"overflow": spec.overflow in ("drop_oldest", "latest") and stats.matched > spec.maxsize,
                   "newest": spec.overflow == "drop_newest" and stats.matched > spec.maxsize,
                   "coalesced": spec.overflow == "latest",
                   "block_timeout": spec.overflow == "block" and stats.matched > spec.maxsize,
                   "reserve": stats.matched > spec.maxsize + RESERVE,
                   "journal": False,
                   "no_thread": spec.kind == "thread" and self._hanging_threads() >= _MOST_ABANDONED,
                   "unsubscribed": bool(self._book.closed or self._book.gone),
                   "disabled": bool(self._book.gone) or spec.on_error == "disable",
                   "closed": self._may_be_dropped_by_closes(stats.dropped_by.get("closed", 0))}  # fmt: skip
        for reason, number in stats.dropped_by.items():
            if not allowed.get(reason, False):
                yield f"{number} events were dropped for reason {reason!r}"

    def _may_have_died(self) -> bool:
        """Whether a child of it may have been killed, or ended by itself."""
        dies = self._record.kills or self._spec.behaviour in ("dies", *HANGING)
        return self._spec.kind == "process" and bool(dies or len(self._record.lives) > 1)

    def _hanging_threads(self) -> int:
        books = self._record.books
        return sum(b.spec.budget for b in books if b.spec.kind == "thread" and b.spec.behaviour in HANGING)

    def _may_be_dropped_by_closes(self, number: int) -> bool:
        """One whose report says that nothing was left may still drop what a publish brought that raced it."""
        lives = self._record.lives
        raced = {
            (p.who, p.n) for p in self._possible for life in lives if p.ended > life.closing and p.began < life.closed
        }
        return number <= len(raced) or not all(life.report is None or life.report.ok for life in lives)

    def _as_it_counted_itself(self) -> Iterator[str]:
        stats, later = self._stats, self._later
        returned = len(self._book.returned)
        if later.delivered > returned and self._spec.kind != "process":
            yield f"delivered {later.delivered}, but its handler returned {returned} times"
        if later.late_ok and self._spec.behaviour not in HANGING:
            yield f"{later.late_ok} were late, though it never hangs"
        if len(self._record.lives) == 1 and (stats.delivered, stats.failed) != (later.delivered, later.failed):
            yield f"what was settled was settled again: {stats}, then {later}"
        if later.timed_out and self._spec.behaviour not in HANGING and not self._may_have_died():
            yield f"{later.timed_out} timed out, though it never hangs"
        if self._may_have_died():
            return
        if self._spec.behaviour in HANGING and (later.timed_out or later.retried):
            return  # a call that was late may have returned after all
        if any(later.dropped_by.get(reason, 0) for reason in _ENDED):
            return
        if later.delivered != returned:
            yield f"delivered {later.delivered}, but its handler returned {returned} times"
        if self._spec.kind != "sink":
            failed = len(self._book.raised) - later.retried + len(self._book.misjudged)
            if later.failed != failed:
                yield f"failed {later.failed}, but its handler gave up {failed} times"

    def _one_at_a_time(self) -> Iterator[str]:
        if self._later.timed_out or self._later.dropped_by.get("closed") or self._spec.kind == "inline":
            return
        if self._book.overlaps:
            yield f"{self._book.overlaps} of its calls began while another ran"

    def _sink_calls(self) -> Iterator[str]:
        """Every `open` that succeeded has one `aclose`, after the last `write`."""
        if "overlap" in self._book.io and len(self._record.lives) == 1:
            yield "a write began while another one ran"
        if self._spec.kind != "sink" or any(life.report is None or not life.report.ok for life in self._record.lives):
            return
        io = [call for call in self._book.io if call not in ("open", "overlap")]
        if io.count("opened") != io.count("aclose") and self._spec.behaviour not in HANGING:
            yield f"it was opened {io.count('opened')} times and closed {io.count('aclose')} times"
        if "write" in io and io[0] != "opened":
            yield f"its calls began with {io[0]}"
