"""JSONLSink and read_jsonl: whole lines whatever happens, rotation, and reading back."""

from __future__ import annotations

import asyncio
import fnmatch
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from io import FileIO
from typing import TYPE_CHECKING, Any

import aiofiles.threadpool
import pytest

import sinks.jsonl
from eventbus.errors import SinkUnavailable
from eventbus.events import EVENTS, Event, ExceptionRaised, FitEpochEnd, Log, TrainBatchEnd, TrainEnd
from sinks import JSONLSink, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INNER_STEPS = {
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_val_batch_start",
    "on_val_image_end",
}


def batch(number: int, **fields: Any) -> TrainBatchEnd:
    values = {"run": "r", "rank": 0, "seq": number + 1, "time": 1.5e9, "metrics": {"loss": 0.25}, "lr": (0.1,)}
    return TrainBatchEnd(epoch=0, batch=number, step=number, **{**values, **fields})


def write(sink: JSONLSink, *batches: Sequence[Event]) -> None:
    async def session() -> None:
        await sink.open()
        try:
            for events in batches:
                await sink.write(events)
        finally:
            await sink.aclose()

    asyncio.run(session())


def steps(path: Path) -> list[int]:
    return [event.step for event in read_jsonl(path)]


def strict(line: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line.decode("utf-8"), parse_constant=refuse)


class TestLines:
    def test_an_event_is_one_line_of_strict_json_whatever_is_in_it(self, tmp_path: Path) -> None:
        """Non-finite numbers, line ends and odd strings (S34, J7)."""
        events = [
            batch(0, metrics={"loss": float("nan"), "up": float("inf"), "down": float("-inf")}),
            Log(step=1, values={"note": "two\nlines\r\u2028", "发": "损失", "bad": "\ud800", "object": object()}),
            ExceptionRaised(message="\x00", traceback="Traceback:\n  File …\n"),
        ]
        write(JSONLSink(tmp_path / "e.jsonl"), events)
        lines = (tmp_path / "e.jsonl").read_bytes().splitlines(keepends=True)
        assert len(lines) == 3
        assert all(line.endswith(b"}\n") for line in lines)
        assert [strict(line)["hook"] for line in lines] == ["on_train_batch_end", "on_log", "on_exception"]
        assert strict(lines[0])["metrics"] == {"loss": "NaN", "up": "Infinity", "down": "-Infinity"}

    def test_events_come_back_typed_and_equal(self, tmp_path: Path) -> None:
        """`read_jsonl` gives what was written, in order."""
        events = [batch(0), FitEpochEnd(epoch=0, metrics={"val/loss": 1.0}, lr=(0.1, 0.2)), TrainEnd(reason="stopped")]
        write(JSONLSink(tmp_path / "e.jsonl"), events[:1], events[1:])
        read = read_jsonl(tmp_path / "e.jsonl")
        assert list(read) == events
        assert read.bad_lines == 0

    def test_by_default_only_the_inner_steps_are_left_out(self) -> None:
        """Exclusions rather than a list, so that a user's own events are heard too."""
        hooks = JSONLSink("x.jsonl").hooks
        out = {name[1:] for name in hooks if name.startswith("!")}
        assert {hook for hook in EVENTS if any(fnmatch.fnmatchcase(hook, pattern) for pattern in out)} == INNER_STEPS
        assert "*" in hooks

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"fsync": "sometimes"}, r"fsync must be one of 'never', 'close', 'always', not 'sometimes'"),
            ({"rotate_bytes": 0}, "rotate_bytes must be a positive number"),
            ({"flush_interval": -1}, "flush_interval must be 0 or more seconds"),
        ],
    )
    def test_a_wrong_option_is_named(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            JSONLSink("x.jsonl", **options)


class TestIO:
    def test_a_thousand_events_are_one_open_and_a_write_per_batch_off_the_loop(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The handle stays open, and the loop's thread does no file IO (A2, A7)."""
        calls: list[str] = []

        class Watched(FileIO):
            def write(self, data: Any) -> int:
                assert threading.current_thread() is not threading.main_thread()
                calls.append("write")
                return super().write(data)

        def opened(file: Path, mode: str, **options: Any) -> FileIO:
            assert threading.current_thread() is not threading.main_thread()
            assert options["buffering"] == 0
            calls.append("open")
            return Watched(file, mode)

        monkeypatch.setattr(aiofiles.threadpool, "sync_open", opened)
        aiofiles.threadpool.wrap.register(Watched, aiofiles.threadpool.wrap.dispatch(FileIO))
        write(
            JSONLSink(tmp_path / "e.jsonl"),
            *([batch(n) for n in range(start, start + 100)] for start in range(0, 1000, 100)),
        )
        assert calls == ["open"] + ["write"] * 10
        assert steps(tmp_path / "e.jsonl") == list(range(1000))

    @pytest.mark.parametrize(("fsync", "expected"), [("never", 0), ("close", 1), ("always", 4)])
    def test_fsync_happens_when_it_was_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: Any, expected: int
    ) -> None:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        write(JSONLSink(tmp_path / "e.jsonl", fsync=fsync), [batch(0)], [batch(1)], [batch(2)])
        assert len(synced) == expected

    def test_a_full_disk_is_unavailable_not_lost(self) -> None:
        """The write itself fails, since nothing is buffered."""
        with pytest.raises(SinkUnavailable, match="JSONLSink cannot write /dev/full: No space left on device"):
            write(JSONLSink("/dev/full"), [batch(0)])

    def test_a_write_that_stopped_short_is_taken_back_whole(self, tmp_path: Path) -> None:
        """A disk that takes some lines of a batch and not the rest: the retry repeats none."""
        path = tmp_path / "e.jsonl"

        async def session() -> None:
            sink = JSONLSink(path)
            await sink.open()
            await sink.write([batch(0)])
            size = path.stat().st_size
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 + 9, hard))  # one more line and a bit
            try:
                for _ in range(2):
                    with pytest.raises(SinkUnavailable, match=r"No space left on device \(\d+ of \d+ bytes written\)"):
                        await sink.write([batch(1), batch(2)])
                    assert path.stat().st_size == size
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            await sink.write([batch(1), batch(2)])
            await sink.aclose()

        asyncio.run(session())
        assert steps(path) == [0, 1, 2]

    def test_what_an_unbuffered_write_returned_for_survives_sigkill(self, tmp_path: Path) -> None:
        """A killed process loses nothing that was written, and the next one goes on behind it (D19, S21)."""
        path = tmp_path / "e.jsonl"
        script = (
            "import asyncio, sys\n"
            "from eventbus.events import Log\n"
            "from sinks import JSONLSink\n"
            "async def main():\n"
            "    sink = JSONLSink(sys.argv[1]); await sink.open()\n"
            "    for n in range(10**9):\n"
            "        await sink.write([Log(step=2 * n), Log(step=2 * n + 1)]); print(2 * n + 1, flush=True)\n"
            "asyncio.run(main())\n"
        )
        for _ in range(2):
            child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            told = [int(child.stdout.readline()) for _ in range(50)]
            child.send_signal(signal.SIGKILL)
            told += [int(line) for line in child.stdout]
            child.stdout.close()
            child.wait()
            read = read_jsonl(path)
            assert [event.step for event in read if event.step <= told[-1]][-len(told) * 2 :] == list(
                range(told[-1] + 1)
            )
            assert read.bad_lines == 0

    def test_cut_anywhere_only_the_torn_line_is_lost(self, tmp_path: Path) -> None:
        """Cut at every byte of the last record, inside a character too; all before and after it parses (S19)."""
        path, torn = tmp_path / "e.jsonl", tmp_path / "e.jsonl.torn"
        write(JSONLSink(path), [Log(step=0)])
        first = path.stat().st_size
        write(JSONLSink(path), [Log(step=1, values={"note": "损失 ≈ 0\n"})])
        whole = path.read_bytes()
        for cut in range(first, len(whole) + 1):
            path.write_bytes(whole[:cut])
            torn.unlink(missing_ok=True)
            write(JSONLSink(path), [Log(step=2)])
            read = read_jsonl(path)
            kept = cut >= len(whole) - 1  # only the line end was cut off
            assert [event.step for event in read] == ([0, 1, 2] if kept else [0, 2])
            assert read.bad_lines == 0
            assert torn.exists() == (not kept and cut > first)
            if torn.exists():
                assert torn.read_bytes() == whole[first:cut] + b"\n"

    def test_a_torn_line_longer_than_the_search_step_is_found(self, tmp_path: Path) -> None:
        path = tmp_path / "e.jsonl"
        path.write_bytes(b'{"hook":"on_log","step":0}\n' + b'{"hook":"on_log","values":"' + b"x" * 200_000)
        write(JSONLSink(path), [Log(step=1)])
        assert steps(path) == [0, 1]
        path.write_bytes(b"\x00" * 200_000)  # what a power cut can leave
        write(JSONLSink(path), [Log(step=1)])
        assert steps(path) == [1]


class TestPaths:
    def test_each_run_and_rank_has_its_file_and_few_are_open(self, tmp_path: Path) -> None:
        """Forty files through sixteen handles."""
        sink = JSONLSink(tmp_path / "{run}" / "rank{rank}.jsonl")

        async def session() -> None:
            sink.bind(run="bound", rank=3)
            await sink.open()
            before = len(os.listdir("/proc/self/fd"))
            for number in range(200):
                await sink.write([batch(number, run=f"run{number % 20}", rank=number // 20 % 2) for _ in "ab"])
            assert len(os.listdir("/proc/self/fd")) <= before + 16
            await sink.aclose()

        asyncio.run(session())
        assert (tmp_path / "bound" / "rank3.jsonl").read_bytes() == b""
        files = sorted(tmp_path.glob("run*/rank*.jsonl"))
        assert len(files) == 40
        assert sum(len(steps(file)) for file in files) == 400
        assert steps(tmp_path / "run3" / "rank0.jsonl") == [3, 3, 43, 43, 83, 83, 123, 123, 163, 163]

    def test_a_batch_of_several_runs_that_failed_half_way_repeats_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "b").write_text("in the way")
        events = [batch(n, run="abc"[n % 3]) for n in range(6)]

        async def session() -> None:
            sink = JSONLSink(tmp_path / "{run}" / "e.jsonl")
            await sink.open()
            for _ in range(2):
                with pytest.raises(SinkUnavailable):
                    await sink.write(events)
                await sink.open()  # as the bus may do before it asks again
            (tmp_path / "b").unlink()
            await sink.write([*events, batch(6, run="a")])
            await sink.aclose()

        asyncio.run(session())
        assert [steps(tmp_path / run / "e.jsonl") for run in "abc"] == [[0, 3, 6], [1, 4], [2, 5]]

    @pytest.mark.parametrize("run", ["../../out", "/out", "..", ".", "", "a\x00b", "..\\..\\out"])
    def test_a_run_name_cannot_lead_out_of_its_place(self, tmp_path: Path, run: str) -> None:
        inside = tmp_path / "deep" / "runs"
        write(JSONLSink(inside / "{run}" / "e.jsonl"), [batch(0, run=run)])
        assert [path.is_relative_to(inside) for path in tmp_path.rglob("*.jsonl")] == [True]

    def test_a_run_name_with_a_slash_is_a_folder(self, tmp_path: Path) -> None:
        write(JSONLSink(tmp_path / "{run}.jsonl"), [batch(0, run="sweep/7")])
        assert steps(tmp_path / "sweep" / "7.jsonl") == [0]

    @pytest.mark.parametrize(
        "path", ["{epoch}.jsonl", "{run!r}.jsonl", "{rank:04d}.jsonl", "{}.jsonl", "a}.jsonl", "{{run}}"]
    )
    def test_other_braces_are_an_error_at_construction(self, path: str) -> None:
        with pytest.raises(ValueError, match=r"Only \{run\} and \{rank\} can be filled in"):
            JSONLSink(path)

    @pytest.mark.parametrize("path", ["", b"bytes"])
    def test_what_is_no_path_is_an_error_at_construction(self, path: Any) -> None:
        with pytest.raises(ValueError, match="must be a non-empty string or path"):
            JSONLSink(path)

    def test_a_later_change_of_directory_moves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        sink = JSONLSink("here/e.jsonl")
        monkeypatch.chdir("/")
        write(sink, [batch(0)])
        assert steps(tmp_path / "here" / "e.jsonl") == [0]


class TestRotation:
    @pytest.mark.parametrize("compress", [False, True])
    def test_segments_are_closed_at_batch_boundaries_and_read_in_order(self, tmp_path: Path, compress: bool) -> None:
        """Also over several sessions; only closed segments are gzipped."""
        path = tmp_path / "e.jsonl"
        for start in (0, 60):
            sink = JSONLSink(path, rotate_bytes=1000, compress=compress)
            write(sink, *([batch(n), batch(n + 1)] for n in range(start, start + 60, 2)))
        names = sorted(file.name for file in tmp_path.iterdir())
        assert len(names) > 9
        assert names[1].endswith(".0001.gz" if compress else ".0001")
        assert not any(name.endswith((".tmp", ".torn")) for name in names)
        assert sum(name.endswith(".gz") for name in names) == (len(names) - 1 if compress else 0)
        read = read_jsonl(path)
        assert [event.step for event in read] == list(range(120))
        assert read.bad_lines == 0
        if compress:
            assert read_jsonl(tmp_path / names[1]).__iter__().__next__().step == 0

    def test_a_file_that_cannot_be_rotated_grows_on_and_says_so_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The lines are written by then, so nothing may make the bus send them again."""

        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(sinks.jsonl, "rotate", refuse)
        write(JSONLSink(tmp_path / "e.jsonl", rotate_bytes=10), *([batch(n)] for n in range(5)))
        assert steps(tmp_path / "e.jsonl") == [0, 1, 2, 3, 4]
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path / 'e.jsonl'} cannot be rotated and grows on: Permission denied"
        ]

    def test_a_compression_that_was_killed_is_taken_up_again(self, tmp_path: Path) -> None:
        """A half-written archive is made anew; a segment whose archive is whole is not read twice."""
        path = tmp_path / "e.jsonl"
        for name, number in (("e.jsonl.0001", 0), ("e.jsonl.0002", 1), ("e.jsonl", 2)):
            write(JSONLSink(tmp_path / name), [batch(number)])
        (tmp_path / "e.jsonl.0001.gz").write_bytes(gzip.compress((tmp_path / "e.jsonl.0001").read_bytes()))
        (tmp_path / "e.jsonl.0002.gz.tmp").write_bytes(b"half")
        assert steps(path) == [0, 1, 2]
        write(JSONLSink(path, compress=True), [batch(3)])
        assert sorted(file.name for file in tmp_path.iterdir()) == ["e.jsonl", "e.jsonl.0001.gz", "e.jsonl.0002.gz"]
        assert steps(path) == [0, 1, 2, 3]


class TestReading:
    def test_bad_lines_are_skipped_and_counted_each_time(self, tmp_path: Path) -> None:
        """A reader beside a live writer, or of a damaged file (S20)."""
        path = tmp_path / "e.jsonl"
        write(JSONLSink(path), [batch(0), batch(1)])
        good = path.read_bytes().splitlines(keepends=True)
        bad = [b"no json\n", b"[1]\n", b'{"no":"hook"}\n', b"\xff\xfe\n", b'{"hook":"on_train_batch_end"}\n', b"\n"]
        path.write_bytes(good[0] + b"".join(bad) + good[1] + good[1][:-5])
        read = read_jsonl(path)
        for _ in range(2):
            assert [event.step for event in read] == [0, 1]
            assert read.bad_lines == 6

    def test_it_reads_lazily(self, tmp_path: Path) -> None:
        path = tmp_path / "e.jsonl"
        write(JSONLSink(path), [batch(n) for n in range(3)])
        events = iter(read_jsonl(path))
        assert next(events).step == 0
        events.close()

    def test_a_damaged_archive_costs_its_rest_only(self, tmp_path: Path) -> None:
        path = tmp_path / "e.jsonl"
        write(JSONLSink(path, rotate_bytes=4000, compress=True), *([batch(n)] for n in range(60)))
        archive = tmp_path / "e.jsonl.0001.gz"
        archive.write_bytes(archive.read_bytes()[:-30])
        read = read_jsonl(path)
        assert steps(path)[-30:] == list(range(30, 60))
        assert list(read)
        assert read.bad_lines >= 1

    def test_a_missing_file_is_an_error_at_once(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"There is no .*e\.jsonl and no segment of it"):
            read_jsonl(tmp_path / "e.jsonl")

    def test_an_event_type_that_is_not_known_here_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "e.jsonl"
        path.write_bytes(b'{"hook":"on_someone_elses","seq":4,"norm":1.5}\n')
        (event,) = read_jsonl(path)
        assert (event.hook, event.seq, event.fields["norm"]) == ("on_someone_elses", 4, 1.5)
