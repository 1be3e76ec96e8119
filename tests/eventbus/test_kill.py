"""G17 under SIGKILL at random moments: what `publish` had returned for is on disk, and durable subscribers go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eventbus.processes import run_program

LIVES = """
    import os, random, signal, sys, threading, time
    from pathlib import Path
    from eventbus import Event, EventBus, read_journal

    class Step(Event):
        life: int = 0
        thread: int = 0
        n: int = 0

    directory, threads, lives, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    random.seed(seed)

    def killed(life, live, most_s):
        \"\"\"What a child reports until it is killed at a random moment after its first report.\"\"\"
        reports = directory / f"reports-{life}"
        child = os.fork()
        if not child:
            fd = os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                live(life, lambda *words: os.write(fd, (" ".join(map(str, words)) + "\\n").encode()))
            finally:
                os._exit(3)
        until = time.monotonic() + 20
        while not (reports.exists() and reports.stat().st_size):
            assert time.monotonic() < until, "nothing is reported"
            time.sleep(0.001)
        time.sleep(random.random() * most_s)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it ended by itself"
        lines = [line.split() for line in reports.read_text().splitlines() if line]  # a kill may tear the last write
        reports.unlink()
        return lines

    def publish(bus, life, report):
        def run(thread):
            for n in range(10**9):
                bus.publish(Step(life=life, thread=thread, n=n))
                report("published", thread, n)
        for thread in range(1, threads):
            threading.Thread(target=run, args=(thread,), daemon=True).start()
        run(0)
"""

JOURNAL = (
    LIVES
    + """
    def live(life, report):
        publish(EventBus(journal=directory / "j"), life, report)

    last = 0
    for life in range(lives):
        reported = {thread: -1 for thread in range(threads)}
        for _, thread, n in killed(life, live, 0.03):
            assert int(n) == reported[int(thread)] + 1
            reported[int(thread)] = int(n)
        written = {thread: -1 for thread in range(threads)}
        for event in read_journal(directory / "j", after=last):
            assert event.seq == last + 1, (event.seq, last)
            last = event.seq
            assert event.life == life, "of another life"
            assert event.n == written[event.thread] + 1, "order"
            written[event.thread] = event.n
        for thread in range(threads):
            assert reported[thread] <= written[thread] <= reported[thread] + 1, (life, thread, reported, written)
    assert sum(1 for _ in read_journal(directory / "j")) == last
    """
)


@pytest.mark.parametrize("threads", [1, 8])
def test_G17_whatever_publish_returned_for_survives_sigkill(tmp_path: Path, threads: int) -> None:
    """In order, each once, with numbers that go on in the next process."""
    run_program(JOURNAL, str(tmp_path), str(threads), "10", "1")


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 8])
def test_G17_whatever_publish_returned_for_survives_sigkill_two_hundred_times(tmp_path: Path, threads: int) -> None:
    run_program(JOURNAL, str(tmp_path), str(threads), "200", "2", timeout=600)


DURABLE = (
    LIVES
    + """
    kind = sys.argv[5]

    def subscribe(bus, report):
        def thread(event):
            report("seen", event.seq, event.life, event.thread, event.n)

        async def task(event):
            thread(event)

        class Sink:
            hooks = ("on_step",)
            options = {}
            max_batch = 32

            async def open(self): pass

            async def write(self, events):
                for event in events:
                    thread(event)

            async def aclose(self): pass

        if kind == "sink":
            return bus.attach(Sink(), durable=True, name="durable")
        run_in = "thread" if kind == "thread" else None
        bus.subscribe(thread if run_in else task, Step, durable=True, name="durable", run_in=run_in, maxsize=64)

    def live(life, report):
        bus = EventBus(journal=directory / "j")
        subscribe(bus, report)
        publish(bus, life, report)

    seen = {}
    returned = set()
    for life in range(lives):
        latest = 0
        reported = killed(life, live, 0.15)
        for word, *numbers in reported:
            numbers = tuple(map(int, numbers))
            if word == "published":
                returned.add((life, *numbers))
                continue
            seq, *event = numbers
            assert seq > latest, "order"
            latest = seq
            assert seen.setdefault(seq, tuple(event)) == tuple(event), "another event with that number"

    last = []
    with EventBus(journal=directory / "j") as bus:
        subscribe(bus, lambda word, *numbers: last.append(numbers))
        assert bus.flush(30)
    for seq, *event in last:
        assert seen.setdefault(seq, tuple(event)) == tuple(event), "another event with that number"
    assert [seq for seq, *_ in last] == sorted({seq for seq, *_ in last})
    assert returned <= set(seen.values()), f"{len(returned - set(seen.values()))} lost"
    assert len(set(seen.values())) == len(seen), "an event with two numbers"
    again = []
    with EventBus(journal=directory / "j") as bus:
        subscribe(bus, lambda *words: again.append(words))
        assert bus.flush(30)
    assert not again, "seen again after a clean close"
    print(len(seen), len(last))
    """
)


@pytest.mark.parametrize("kind", ["task", "thread", "sink"])
def test_G17_a_durable_subscriber_misses_nothing_over_many_killed_lives(tmp_path: Path, kind: str) -> None:
    """At least once, with the same numbers, in order within each life; nothing again after a clean close."""
    run_program(DURABLE, str(tmp_path), "1", "8", "1", kind)


@pytest.mark.long
@pytest.mark.parametrize("threads", ["1", "8"])
@pytest.mark.parametrize("kind", ["task", "thread", "sink"])
def test_G17_a_durable_subscriber_misses_nothing_over_two_hundred_lives(
    tmp_path: Path, kind: str, threads: str
) -> None:
    run_program(DURABLE, str(tmp_path), threads, "200", "2", kind, timeout=900)
