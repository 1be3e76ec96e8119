"""G17 after a power failure or a hostile disk: what is whole is read, nothing is invented, and the journal goes on."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventbus import Event, EventBus, JournalError, read_journal
from eventbus.segment import FIRST, scan, segments_in
from tests.eventbus.samples import Load

SEGMENT = 2048


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on a disk in memory where there is one: these tests make thousands of files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr("eventbus.journal.Journal._start_keeper", lambda _: None)  # no thread for each of thousands


def written(directory: Path, count: int) -> list[Event]:
    """A journal as a killed process leaves it: the file of the last segment keeps all its length."""
    bus = EventBus(journal=directory / "alive", run="r")
    for n in range(count):
        bus.publish(Load(n=n, value="x" * (n * 7 % 40)))
    shutil.copytree(directory / "alive", directory / "left")
    bus.close()
    return list(read_journal(directory / "left"))


def assert_goes_on(directory: Path, readable: list[Event]) -> None:
    """It opens, reads what was readable, and takes more, with higher numbers."""
    before = list(read_journal(directory))
    assert before == readable
    bus = EventBus(journal=directory, run="r")
    for n in range(-12, 0):
        bus.publish(Load(n=n))
    bus.close()
    after = list(read_journal(directory))
    assert after[:-12] == readable
    assert [event.n for event in after[-12:]] == list(range(-12, 0))  # type: ignore[attr-defined]
    numbers = [event.seq for event in after]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("filled", [True, False], ids=["zeros behind", "cut off"])
def test_G17_a_last_record_torn_at_any_byte_is_skipped_and_the_journal_goes_on(memory: Path, filled: bool) -> None:
    events = written(memory, 12)
    last = segments_in(memory / "left")[-1]
    whole = last.read_bytes()
    *_, (begin, end) = places(last)
    for cut in range(begin, end):
        shutil.rmtree(memory / "torn", ignore_errors=True)
        shutil.copytree(memory / "left", memory / "torn")
        (memory / "torn" / last.name).write_bytes(whole[:cut] + bytes(len(whole) - cut if filled else 0))
        is_whole = not any(whole[cut:end])  # only of the zeros that fill it up something is missing
        if is_whole and not filled:
            continue
        assert_goes_on(memory / "torn", events if is_whole else events[:-1])


def places(path: Path) -> Iterator[tuple[int, int]]:
    """Where each record of a segment begins and ends, in bytes."""
    at = FIRST
    for record in scan(path):
        yield at << 3, record.end << 3
        at = record.end


damages = st.lists(
    st.tuples(
        st.integers(0, 3), st.floats(0, 1, exclude_max=True), st.sampled_from([1, 4, 8, 64, 512]),
        st.sampled_from(["zeros", "ones", "noise", "flip", "shift"]), st.randoms(use_true_random=False),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(damages)
def test_G17_damage_anywhere_costs_only_the_records_it_touches(memory: Path, damages: list[Any]) -> None:
    """Zeros, noise, flipped bits and missing pages, in heads, records and between: reopening never raises."""
    directory = Path(tempfile.mkdtemp(dir=memory))
    events = written(directory, 60)
    left = directory / "left"
    segments = segments_in(left)
    assert len(segments) > 2
    original = {path: path.read_bytes() for path in segments}
    whereabouts = [(path, *where) for path in segments for where in places(path)]
    for number, where, size, how, random in damages:
        path = segments[number % len(segments)]
        data = bytearray(path.read_bytes())
        begin = int(where * len(data))
        hurt = data[begin : begin + size]
        if how == "flip":
            hurt[0] ^= 1 << random.randrange(8)
        elif how == "shift":
            hurt = hurt[1:] + hurt[:1]
        else:
            hurt[:] = {"zeros": bytes(len(hurt)), "ones": b"\xff" * len(hurt), "noise": random.randbytes(len(hurt))}[
                how
            ]
        data[begin : begin + size] = hurt
        path.write_bytes(data)
    hurt_now = {path: path.read_bytes() for path in segments}
    unhurt = [
        event
        for event, (path, begin, end) in zip(events, whereabouts, strict=True)
        if original[path][begin:end] == hurt_now[path][begin:end]
    ]
    readable = list(read_journal(left))
    assert [event for event in readable if event in unhurt] == unhurt
    assert all(event in events for event in readable), "invented"
    assert_goes_on(left, readable)


def test_G17_a_file_that_is_no_segment_is_left_alone(tmp_path: Path) -> None:
    for name in ("2024.events", "1 (copy).events", "notes.txt"):
        (tmp_path / name).write_text("mine")
    with EventBus(journal=tmp_path) as bus:
        bus.publish(Load(n=1))
    assert [event.n for event in read_journal(tmp_path)] == [1]  # type: ignore[attr-defined]
    assert (tmp_path / "2024.events").read_text() == (tmp_path / "1 (copy).events").read_text() == "mine"


def test_G17_a_journal_of_another_version_is_refused_and_the_directory_stays_free(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (path,) = segments_in(tmp_path / "left")
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\x02\0\0\0\xfd\xff\xff\xff" + data[16:])
    for _ in range(2):
        with pytest.raises(JournalError, match="was written by another version of trainbus"):
            EventBus(journal=tmp_path / "left")
    path.write_bytes(data)
    EventBus(journal=tmp_path / "left").close()


def test_G17_what_was_torn_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, 3)
    (path,) = segments_in(tmp_path / "left")
    *_, (begin, end) = places(path)
    data = bytearray(path.read_bytes())
    data[begin + 20] ^= 255
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        EventBus(journal=tmp_path / "left").close()
    (record,) = caplog.records
    assert f"{len(data[begin:end].rstrip(bytes(1)))} torn bytes were cut off behind event 2." in record.getMessage()
