"""CSVSink: columns that appear later, resumed runs, and files that survive a crash in any state."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from eventbus.errors import SinkUnavailable
from eventbus.events import (
    Event,
    ExceptionRaised,
    FitEpochEnd,
    Log,
    LRChange,
    ModelSave,
    PretrainRoutineStart,
    Teardown,
    TrainBatchEnd,
    ValEnd,
)
from sinks import CSVSink
from tests.sinks.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def epoch(number: int, **fields: Any) -> FitEpochEnd:
    values = {"run": "r", "rank": 0, "seq": number + 1, "time": 1.5e9 + number, "step": 100 * number}
    return FitEpochEnd(epoch=number, **{**values, **fields})


def write(path: Path, *batches: Sequence[Event]) -> None:
    async def session() -> None:
        sink = CSVSink(path)
        await sink.open()
        try:
            for events in batches:
                await sink.write(events)
        finally:
            await sink.aclose()

    asyncio.run(session())


def column(path: Path, name: str) -> list[str]:
    return [row[name] for row in rows_of(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


class TestCells:
    def test_an_event_is_one_row_of_flat_columns(self, path: Path) -> None:
        """Metrics by their own names, one column per learning rate, an empty cell for what is not known."""
        write(path, [epoch(3, metrics={"val/loss": 0.5, "acc": 1.0}, lr=(0.1, 0.01), monitor="val/loss")])
        (row,) = rows_of(path)
        assert list(row)[:6] == ["time", "run", "rank", "attempt", "seq", "hook"]
        assert row["hook"] == "on_fit_epoch_end"
        assert (row["val/loss"], row["acc"], row["lr/pg0"], row["lr/pg1"]) == ("0.5", "1.0", "0.1", "0.01")
        assert (row["epoch"], row["step"], row["partial"], row["monitor"]) == ("3", "300", "False", "val/loss")
        assert row["fitness"] == ""
        assert "metrics" not in row

    def test_non_finite_numbers_are_written_as_every_reader_knows_them(self, path: Path) -> None:
        write(path, [epoch(0, metrics={"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e-300})])
        (row,) = rows_of(path)
        assert [row[name] for name in "abcd"] == ["nan", "inf", "-inf", "1e-300"]
        assert [float(row[name]) for name in "bcd"] == [float("inf"), float("-inf"), 1e-300]

    def test_nested_values_are_joined_by_slashes_and_take_no_name_twice(self, path: Path) -> None:
        config = {"model": {"depth": 3, "widths": [8, 16]}, "name": "x"}
        write(path, [PretrainRoutineStart(config=config, name="run"), Log(step=7, values={"step": 1, "a": {"b": 2}})])
        start, log = rows_of(path)
        assert [start[f"config/{key}"] for key in ("model/depth", "model/widths/0", "model/widths/1", "name")] == [
            *("3", "8", "16", "x")
        ]
        assert start["name"] == "run"
        assert (log["step"], log["values/step"], log["a/b"]) == ("7", "1", "2")

    def test_texts_come_back_as_they_were(self, path: Path) -> None:
        """Quotes, line ends of every kind, separators and other scripts, in values and in names."""
        text = 'a "quoted", text;\r\nwith\rall\n\n损失\t'
        write(path, [ExceptionRaised(message=text), epoch(0, metrics={'loss, "scaled"\n': 1.0})])
        first, second = rows_of(path)
        assert first["message"] == text
        assert second['loss, "scaled"\n'] == "1.0"

    def test_a_cell_is_never_longer_than_readers_take(self, path: Path) -> None:
        write(path, [ExceptionRaised(traceback="x" * 200_000)])
        assert len(column(path, "traceback")[0]) == 32_767
        write(path, [ExceptionRaised(seq=9)])
        assert len(rows_of(path)) == 2


class TestColumns:
    def test_a_column_that_appears_later_is_added_to_the_whole_file(self, path: Path) -> None:
        """Earlier rows are kept, with empty cells; the file keeps its mode and nothing lies around."""
        write(path, [epoch(0, metrics={"a": 1.0})], [epoch(1, metrics={"a": 2.0})])
        path.chmod(0o640)
        write(path, [epoch(2, metrics={"b": 3.0, "a": 4.0})], [epoch(3, metrics={"c": 5.0}), epoch(4)])
        assert [(row["a"], row["b"], row["c"]) for row in rows_of(path)] == [
            *(("1.0", "", ""), ("2.0", "", ""), ("4.0", "3.0", ""), ("", "", "5.0"), ("", "", ""))
        ]
        assert path.stat().st_mode & 0o777 == 0o640
        assert os.listdir(path.parent) == [path.name]

    def test_a_resume_with_new_columns_has_one_header(self, path: Path) -> None:
        """S26: three new columns, one header, every row readable."""
        write(path, [epoch(0, metrics={"a": 1.0})])
        write(path, [epoch(1, metrics={"a": 2.0, "x": 1.0, "y": 2.0, "z": 3.0})])
        assert path.read_text().count("hook") == 1
        assert column(path, "epoch") == ["0", "1"]
        assert column(path, "z") == ["", "3.0"]

    def test_a_link_stays_a_link(self, path: Path) -> None:
        real = path.parent / "elsewhere" / "m.csv"
        real.parent.mkdir()
        real.touch()
        path.symlink_to(real)
        write(path, [epoch(0)], [epoch(1, metrics={"new": 1.0})])
        assert path.is_symlink()
        assert column(real, "epoch") == ["0", "1"]

    def test_a_rewrite_that_fails_leaves_the_file_as_it_was(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And the same rows go in at the next try, once."""

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        async def session() -> None:
            sink = CSVSink(path)
            await sink.open()
            await sink.write([epoch(0)])
            before = path.read_bytes()
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", refuse)
                for _ in range(2):
                    with pytest.raises(SinkUnavailable, match=r"CSVSink cannot write .*: No space left on device"):
                        await sink.write([epoch(1, metrics={"new": 1.0})])
            assert path.read_bytes() == before
            assert os.listdir(path.parent) == [path.name]
            await sink.write([epoch(1, metrics={"new": 1.0})])
            await sink.aclose()

        asyncio.run(session())
        assert column(path, "epoch") == ["0", "1"]

    def test_a_file_of_another_program_is_continued(self, path: Path) -> None:
        """Its columns, its line ends and a ragged row are respected."""
        path.write_bytes(b"\xef\xbb\xbfepoch,mAP\r\n0,0.5\r\n1\r\n\r\n")
        write(path, [epoch(2, metrics={"mAP": 0.75})])
        text = path.read_bytes().decode("utf-8-sig").splitlines()
        assert text[0].startswith("epoch,mAP,time,run")
        assert text[1].startswith("0,0.5,")
        assert text[2].startswith("1,,")
        assert text[4].startswith("2,0.75,")

    def test_a_full_disk_is_unavailable(self) -> None:
        with pytest.raises(SinkUnavailable, match="CSVSink cannot write /dev/full: No space left on device"):
            write(Path("/dev/full"), [epoch(0)])


class TestResume:
    def test_epochs_that_are_run_again_replace_the_lost_ones_in_place(self, path: Path) -> None:
        """Nothing older than the resume point is touched; what is not run again stays (J5, S22, S28)."""
        write(path, [epoch(n, metrics={"loss": 1.0}) for n in range(6)])
        before = path.read_bytes().splitlines(keepends=True)
        write(
            path, [epoch(3, metrics={"loss": 2.0}, attempt=1, step=999)], [epoch(4, metrics={"loss": 2.0}, attempt=1)]
        )
        assert column(path, "epoch") == ["0", "1", "2", "3", "4", "5"]
        assert column(path, "loss") == ["1.0", "1.0", "1.0", "2.0", "2.0", "1.0"]
        assert path.read_bytes().splitlines(keepends=True)[:4] == before[:4]
        write(path, [epoch(n, metrics={"loss": 3.0}, attempt=2) for n in range(5, 8)])
        assert column(path, "epoch") == ["0", "1", "2", "3", "4", "5", "6", "7"]
        assert column(path, "attempt") == ["0", "0", "0", "1", "1", "2", "2", "2"]

    def test_an_event_that_is_delivered_again_after_a_restart_is_one_row(self, path: Path) -> None:
        """At least once from the bus is once in the file."""
        events = [epoch(0), Teardown(run="r", rank=0, seq=9), LRChange(run="r", rank=0, seq=3, step=5)]
        write(path, events)
        write(path, events)
        assert len(rows_of(path)) == 3

    def test_two_runs_in_one_file_both_stay(self, path: Path) -> None:
        """S24: back to back in one folder, under different names."""
        write(path, [epoch(0, run="a"), epoch(1, run="a")])
        write(path, [epoch(0, run="b"), epoch(0, run="b", rank=1)])
        assert column(path, "run") == ["a", "a", "b", "b"]

    def test_what_this_session_wrote_is_never_replaced(self, path: Path) -> None:
        """A user may log twice at one step, also when the file had to be opened anew in between."""

        async def session() -> None:
            sink = CSVSink(path)
            await sink.open()
            now = sink._opened_at + 1
            await sink.write([Log(step=1, seq=1, time=now, values={"a": 1}), Log(step=1, seq=2, time=now)])
            await sink._drop(path)
            await sink.write([Log(step=1, seq=3, time=now, values={"a": 3})])
            await sink.aclose()

        asyncio.run(session())
        assert column(path, "seq") == ["1", "2", "3"]

    def test_several_rows_of_one_place_are_replaced_together(self, path: Path) -> None:
        """Two of the lost attempt make way for three of the new one."""
        write(path, [Log(step=1, values={"n": 1}), Log(step=1, values={"n": 2}), Log(step=2, values={"n": 3})])
        write(path, [Log(step=1, values={"n": n}) for n in (4, 5)], [Log(step=1, values={"n": 6})])
        assert column(path, "n") == ["4", "5", "3", "6"]

    def test_what_tells_rows_apart_fits_the_hook(self, path: Path) -> None:
        """Batches by number though the step stands still; checkpoints by path; failures by attempt."""
        common: dict[str, Any] = {"run": "r", "rank": 0}
        events = [
            TrainBatchEnd(epoch=0, batch=0, step=0, **common),
            TrainBatchEnd(epoch=0, batch=1, step=0, **common),
            ModelSave(path="last.pt", epoch=0, step=1, **common),
            ModelSave(path="best.pt", epoch=0, step=1, **common),
            ValEnd(epoch=0, step=1, phase="sanity", **common),
            ValEnd(epoch=0, step=1, phase="fit", **common),
        ]
        write(path, events, [ExceptionRaised(epoch=0, step=1, seq=7, **common)])
        write(path, events, [ExceptionRaised(epoch=0, step=1, seq=7, attempt=1, **common)])
        assert len(rows_of(path)) == len(events) + 2

    def test_cut_anywhere_only_the_torn_row_is_lost(self, path: Path) -> None:
        """Cut at every byte of the last row, inside a quoted line end too."""
        torn = path.with_name("metrics.csv.torn")
        write(path, [ExceptionRaised(seq=1, message="first\nrow")])
        first = path.stat().st_size
        write(path, [ExceptionRaised(seq=2, message='损失 "≈" 0\n\n', traceback="a\nb")])
        whole = path.read_bytes()
        for cut in range(first, len(whole) + 1):
            path.write_bytes(whole[:cut])
            torn.unlink(missing_ok=True)
            write(path, [ExceptionRaised(seq=3)])
            assert column(path, "seq") == (["1", "2", "3"] if cut == len(whole) else ["1", "3"])
            assert column(path, "message")[0] == "first\nrow"
            assert torn.exists() == (first < cut < len(whole))

    def test_a_torn_header_is_begun_anew(self, path: Path) -> None:
        write(path, [epoch(0)])
        for cut in (1, 10, path.read_bytes().index(b"\n")):
            path.write_bytes(path.read_bytes()[:cut])
            write(path, [epoch(5)])
            assert column(path, "epoch") == ["5"]


_session = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "b"]), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_session, min_size=1, max_size=4))
@example([[(1, "", False), (0, "", False), (1, "", False)], [(0, "", True), (1, "", False)]])
@example([[(0, "", False)], [(0, "a", True), (0, "", True)], [(0, "b", False), (0, "", False)]])
def test_any_sequence_of_sessions_leaves_what_a_simple_model_says(sessions: list[list[tuple[int, str, bool]]]) -> None:
    """Rows of earlier sessions make way for those of the same epoch, at their place; all else is appended."""
    model: list[tuple[int, int, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        path, seq = Path(folder) / "m.csv", 0
        for session in sessions:
            batches: list[list[Event]] = [[]]
            replaceable = {number for number, _, _ in model}
            for number, metric, is_last_of_batch in session:
                seq += 1
                batches[-1].append(epoch(number, seq=seq, metrics={metric: float(seq)} if metric else {}))
                if is_last_of_batch:
                    batches.append([])
            for events in batches:
                model = _after(model, events, replaceable)
            write(path, *batches)
        found = [
            (int(row["epoch"]), int(row["seq"]), next((name for name in "ab" if row.get(name)), ""))
            for row in rows_of(path)
        ]
        assert found == model


def _after(model: list[tuple[int, int, str]], events: list[Event], replaceable: set[int]) -> list[tuple[int, int, str]]:
    new: dict[int, list[tuple[int, int, str]]] = {}
    added = []
    for event in events:
        assert isinstance(event, FitEpochEnd)
        row = (event.epoch, event.seq, next(iter(event.metrics), ""))
        (new.setdefault(event.epoch, []) if event.epoch in replaceable else added).append(row)
    replaceable.difference_update(new)
    replaced = set(new)
    kept: list[tuple[int, int, str]] = []
    for old in model:
        kept += new.pop(old[0], []) if old[0] in replaced else [old]
    return kept + added
