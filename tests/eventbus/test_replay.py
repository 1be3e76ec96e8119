"""`python -m eventbus tail` and `replay`: the journal for people, and delivering once more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventbus import Event, EventBus, Log, SinkGone, SinkUnavailable, TrainBatchEnd, encode, read_journal
from eventbus import replay as replaying
from eventbus.__main__ import main
from eventbus.tail import follow
from sinks.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A closed journal with five logs and a batch."""
    bus = EventBus(journal=tmp_path / "journal", run="r")
    for step in range(5):
        bus.publish(Log(step=step, values={"loss": float("nan")}))
    bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1))
    bus.close()
    return tmp_path / "journal"


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_tail_prints_strict_json_lines_with_the_numbers_of_the_events(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tail", str(journal)]) == 0
    lines = printed(capsys)
    assert [line["hook"] for line in lines] == ["on_log"] * 5 + ["on_train_batch_end"]
    assert lines[0]["values"] == {"loss": "NaN"}
    assert [line["seq"] for line in lines] == [event.seq for event in read_journal(journal)]


def test_tail_picks_by_hook_by_number_and_the_last_ones(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", str(journal), "--hook", "on_lo*", "-n", "2"]) == 0
    lines = printed(capsys)
    assert [line["step"] for line in lines] == [3, 4]
    assert main(["tail", str(journal), "--after", str(lines[0]["seq"])]) == 0
    assert [line["step"] for line in printed(capsys)] == [4, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tail", "nowhere"], "Journal 'nowhere' is no directory"),
        (["tail", "{journal}", "--hook", "on_lgo"], "Did you mean 'on_log'?"),
        (["replay", "{journal}", "--to", "here.xyz"], "Nothing takes events to 'here.xyz'"),
        (["replay", "{journal}", "--to", "ftp://u:p@host/x"], r"Nothing takes events to 'ftp://\[redacted\]@host/x'"),
        (["replay", "{journal}", "--to", "json:nothing"], "json:nothing cannot be imported"),
        (["replay", "{journal}", "--to", "os:sep"], "'/' is neither a sink nor a function"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    journal: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([argument.format(journal=journal) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error)


def test_follow_yields_what_is_published_later_across_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    bus = EventBus(journal=tmp_path)
    bus.publish(Log(step=-1))
    events: Iterator[Event] = follow(tmp_path, 0, pause=lambda seconds: publish())
    rounds = iter(range(100))

    def publish() -> None:
        for _ in range(20):
            bus.publish(Log(step=next(rounds)))

    seen = [next(events).step for _ in range(100)]  # type: ignore[attr-defined]
    assert seen == list(range(-1, 99))
    assert len(list(tmp_path.glob("*.events"))) > 1
    bus.close()


def test_replay_writes_a_file_with_the_same_numbers(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "{run}.jsonl"
    command = [sys.executable, "-W", "error", "-m", "eventbus", "replay", str(journal), "--to", str(target)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "6 events delivered, 0 failed\n"
    written = [encode(event) for event in read_jsonl(tmp_path / "out" / "r.jsonl")]
    assert written == [encode(event) for event in read_journal(journal)]


class Picky:
    """A sink that is away once, fails on one event, and is gone after another."""

    hooks = ("on_log",)
    options: dict[str, object] = {}

    def __init__(self, gone_at: int = 99) -> None:
        self.got: list[Event] = []
        self.calls: list[str] = []
        self._away = True
        self._gone_at = gone_at

    async def open(self) -> None:
        self.calls.append("open")

    async def write(self, events: list[Event]) -> None:
        if self._away:
            self._away = False
            raise SinkUnavailable("not yet")
        for event in events:
            if event.step == 2:  # type: ignore[attr-defined]
                raise ValueError("odd")
            if event.step == self._gone_at:  # type: ignore[attr-defined]
                raise SinkGone("410")
            self.got.append(event)

    async def aclose(self) -> None:
        self.calls.append("close")


@pytest.mark.anyio
async def test_replay_insists_on_an_absent_sink_and_counts_what_fails(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "_PAUSE_S", 0.001)
    sink = Picky()
    assert await replaying.replay(read_journal(journal), sink) == (4, 1)
    assert [event.step for event in sink.got] == [0, 1, 3, 4]  # type: ignore[attr-defined]
    assert sink.calls == ["open", "close"]


@pytest.mark.anyio
async def test_replay_ends_when_the_receiver_wants_no_more_and_closes_the_sink(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "_PAUSE_S", 0.001)
    sink = Picky(gone_at=3)
    with pytest.raises(replaying.ReplayError, match="wants no more events: 410"):
        await replaying.replay(read_journal(journal), sink)
    assert sink.calls == ["open", "close"]


@pytest.mark.anyio
async def test_replay_calls_functions_in_order_with_the_hooks_asked_for(journal: Path) -> None:
    seen: list[int] = []

    async def later(event: Event) -> None:
        seen.append(event.seq)

    assert await replaying.replay(read_journal(journal), later, hooks=["on_train_*"]) == (1, 0)
    assert await replaying.replay(read_journal(journal), lambda event: seen.append(event.seq)) == (6, 0)
    assert seen == [event.seq for event in [*list(read_journal(journal))[-1:], *read_journal(journal)]]


def test_a_reader_does_not_disturb_a_writer(tmp_path: Path) -> None:
    """Eight readings of a journal that several threads write to: each sees a prefix of it, in order."""
    bus = EventBus(journal=tmp_path)
    threads = [threading.Thread(target=lambda: [bus.publish(Log(step=step)) for step in range(500)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    readings = [[event.seq for event in read_journal(tmp_path)] for _ in range(8)]
    for thread in threads:
        thread.join()
    bus.close()
    whole = [event.seq for event in read_journal(tmp_path)]
    assert len(whole) == 1500
    assert all(reading == whole[: len(reading)] for reading in readings)
