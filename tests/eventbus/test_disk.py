"""G17 where the disk takes no more, or somebody meddles with the directory: training goes on, losses are counted."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from eventbus import EventBus, JournalError, read_journal
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Tick, assert_balanced
from tests.eventbus.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits and rights of another kind")

FULL = """
    import logging, re, resource, signal, sys, threading
    import eventbus.journal
    from eventbus import Event, EventBus, read_journal

    class Tick(Event, shed=True):
        n: int = 0

    class Told(logging.Handler):
        def emit(self, record):
            told.append((record.levelname, record.getMessage()))

    told = []
    logging.getLogger("eventbus").addHandler(Told())
    directory, served = sys.argv[1], sys.argv[2] == "served"
    eventbus.journal._SEGMENT_BYTES = 4096
    eventbus.journal._NOWHERE_BYTES = 512

    def full(is_full):  # to a process that may write no byte more to a file, every disk is full
        most = 0 if is_full else resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    release = threading.Event()
    seen = []
    released = {"spill": [], "durable": []}

    def slow(name):
        def handle(event):
            release.wait()
            released[name].append(event)
        return handle

    bus = EventBus(journal=directory)
    if served:
        bus.subscribe(print, Tick, run_in="thread", durable=True, name="one that never comes back")
        bus.close()  # so that no segment is removed
        bus = EventBus(journal=directory)
        bus.subscribe(seen.append, Tick, run_in="thread", maxsize=10**6, name="kept")
        bus.subscribe(slow("spill"), Tick, run_in="thread", overflow="spill", maxsize=8, name="spill")
        bus.subscribe(slow("durable"), Tick, run_in="thread", durable=True, maxsize=8, name="durable")
    n = 0

    def publish(count):
        global n
        for _ in range(count):
            bus.publish(Tick(n=n))
            n += 1

    publish(200)
    bus.stats()
    while not bus._journal._spares:  # a segment that is being made now would be found in the middle of the gap
        threading.Event().wait(0.01)
    full(True)
    publish(2000)
    bus.stats()
    full(False)
    for _ in range(100):
        publish(20)
        bus.stats()
        if not bus._journal.lost_from:
            break
        threading.Event().wait(0.05)
    publish(200)
    release.set()
    if served:
        assert bus.flush(30)
    stats = bus.stats()
    assert bus.close().ok

    on_disk = list(read_journal(directory))
    written = [event.n for event in on_disk if type(event) is Tick]
    lost = sorted(set(range(n)) - set(written))
    assert written == sorted(set(written)), "order"
    assert lost and lost == list(range(lost[0], lost[-1] + 1)), "one gap"
    assert 200 <= lost[0] and lost[-1] < n - 200, (lost[0], lost[-1])
    errors = [text for level, text in told if level == "ERROR"]
    full, gap = [[text for text in errors if what in text] for what in ("takes no more", "lacks the events")]
    assert len(full) == len(gap) == 1, told
    first, last = map(int, re.search(r"lacks the events (\\d+) to (\\d+)\\.", gap[0]).groups())
    assert f"events from {first} on are not in it" in full[0], full
    assert not any(first <= event.seq <= last for event in on_disk), "it says what is in it"
    assert all(first <= event.seq <= last for event in seen if event.n in lost), "it does not say what is not"
    if served:
        assert [event.n for event in seen] == list(range(n)), "who keeps up hears everything"
        for name, events in released.items():
            s = stats[name]
            assert s.matched == n == s.delivered + s.dropped, s
            assert s.dropped_by == {"journal": s.dropped} and 0 < s.dropped <= len(lost), s
            assert set(written) <= {event.n for event in events}, "what is on disk is delivered"
            assert [event.n for event in events] == sorted({event.n for event in events}), "order"
"""


@pytest.mark.parametrize("served", ["served", "alone"])
def test_G17_a_full_disk_costs_the_events_it_does_not_take_and_is_told_once(tmp_path: Path, served: str) -> None:
    """It recovers by itself; who keeps up hears all, who spilled hears what was written, and counts the rest."""
    run_program(FULL, str(tmp_path), served)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_G15_a_directory_that_cannot_be_written_is_told_at_the_constructor(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(JournalError, match="cannot be written"):
            EventBus(journal=tmp_path / "j")
    finally:
        tmp_path.chmod(0o700)


def test_G15_a_file_in_the_place_of_the_directory_is_told_at_the_constructor(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("mine")
    with pytest.raises(JournalError, match=r"cannot be written \(.*\)\. Give a directory on a local disk"):
        EventBus(journal=tmp_path / "j")
    with pytest.raises(JournalError, match="cannot be written"):
        EventBus(journal=tmp_path / "j" / "below")
    assert (tmp_path / "j").read_text() == "mine"


def test_G17_a_directory_that_is_removed_while_it_runs_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    seen: list[int] = []
    release = threading.Event()

    def slow(event: Tick) -> None:
        release.wait()
        seen.append(event.n)

    with EventBus(journal=tmp_path / "j") as bus, caplog.at_level(logging.ERROR):
        bus.subscribe(slow, Tick, run_in="thread", durable=True, name="slow", maxsize=4)
        for n in range(500):
            bus.publish(Tick(n=n))
        bus.stats()
        while (tmp_path / "j").exists():  # it may be making the next file
            shutil.rmtree(tmp_path / "j", ignore_errors=True)
        for n in range(500, 1000):
            bus.publish(Tick(n=n))
        bus.stats()
        release.set()
        assert bus.flush()
        stats = assert_balanced(bus)["slow"]
        assert stats.matched == 1000 == stats.delivered + stats.dropped_by["journal"]
        until(lambda: "takes no more (No such file or directory)" in caplog.text)
    assert seen == sorted(set(seen))
    assert len(seen) == stats.delivered


def test_G17_numbers_go_on_when_everything_was_delivered_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nobody is left who remembers: receivers tell events apart by them."""
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 2048)
    numbers: list[int] = []
    for _ in range(4):
        with EventBus(journal=tmp_path) as bus:
            bus.subscribe(lambda event: numbers.append(event.seq), Tick, run_in="thread", durable=True, name="d")
            for n in range(200):
                bus.publish(Tick(n=n))
            assert bus.flush()
            bus.off("d")
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 800


def test_G17_numbers_go_on_after_a_segment_that_was_begun_and_got_no_event(tmp_path: Path) -> None:
    """Closed just after the last segment was full, and all before it were removed."""
    bus = EventBus(journal=tmp_path, autostart=False)
    for n in range(5):
        bus.publish(Tick(n=n))
    journal = bus._journal
    assert journal is not None
    journal._roll(journal._segment, 0)
    full, _begun = sorted(tmp_path.glob("*.events"))[:2]
    bus.close()
    full.unlink()
    again = EventBus(journal=tmp_path, autostart=False)
    again.publish(Tick(n=5))
    again.close()
    (event,) = read_journal(tmp_path)
    assert event.seq == 6


def test_G17_the_journal_holds_what_a_rolled_segment_held_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads that roll small segments all the time, and events larger than a segment among them."""
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 1024)
    from tests.eventbus.samples import Load

    bus = EventBus(journal=tmp_path)

    def publish(thread: int) -> None:
        for n in range(150):
            bus.publish(Load(n=1000 * thread + n, value="x" * (3000 if n % 40 == 7 else n % 60)))

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.close()
    events = list(read_journal(tmp_path))
    assert [event.seq for event in events] == list(range(1, 1201))
    for number in range(8):
        mine = [event.n for event in events if event.n // 1000 == number]  # type: ignore[attr-defined]
        assert mine == [1000 * number + n for n in range(150)]
    for after in (0, 1, 600, 1199):
        assert [event.seq for event in read_journal(tmp_path, after=after)] == list(range(after + 1, 1201))
