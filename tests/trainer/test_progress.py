"""The progress line: on stderr, bounded, and nothing at all on stdout."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.toys import batches, make_trainer
from trainer import ProgressBar

if TYPE_CHECKING:
    from eventbus import EventBus


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(bus: EventBus, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(bus, callbacks=[ProgressBar()]).fit(batches(50), batches(1), epochs=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/2 train/loss=")
    assert "val/loss=" in lines[1]
    assert lines[2] == "training completed after 100 steps"


def test_a_line_in_between_tells_the_loss_so_far(bus: EventBus) -> None:
    file = io.StringIO()
    trainer = make_trainer(bus, callbacks=[ProgressBar(line_every=0.0, file=file)])
    trainer.fit(batches(2), max_steps=3)
    assert [line.rpartition("=")[0] for line in file.getvalue().splitlines()[:3]] == [
        "epoch 1 batch 1/2 loss", "epoch 1 batch 2/2 loss", "epoch 1 train/loss",
    ]  # fmt: skip


def test_a_bar_on_a_terminal_is_taken_away_again(bus: EventBus, capsys: pytest.CaptureFixture[str]) -> None:
    file = Terminal()
    make_trainer(bus, callbacks=[ProgressBar(file=file, refresh_every=0.0)]).fit(batches(3), epochs=1)
    text = file.getvalue()
    assert "epoch 1/1" in text
    assert "loss=" in text
    assert text.splitlines()[-1] == "training completed after 3 steps"
    assert capsys.readouterr().out == ""


def test_a_bar_is_refreshed_a_bounded_number_of_times(bus: EventBus) -> None:
    """The loss is read from the device only when it is shown."""
    reads: list[int] = []

    class Counting(ProgressBar):
        def _show(self, trainer: Any) -> None:
            reads.append(trainer.step)
            super()._show(trainer)

    make_trainer(bus, callbacks=[Counting(file=Terminal(), refresh_every=60.0)]).fit(batches(100), epochs=1)
    assert reads == []


def test_without_torch_the_import_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\ntry:\n    import trainer\nexcept ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == 'trainer needs PyTorch, which is not installed: pip install "trainbus[train]"\n'


def test_a_whole_training_prints_nothing(bus: EventBus, tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.fit(batches(2), batches(1), epochs=2, test_loader=batches(1))
    list(trainer.predict(batches(1)))
    assert capfd.readouterr() == ("", "")
