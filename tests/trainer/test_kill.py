"""SIGKILL at a random moment of a training: a whole checkpoint, none older than was told, and the same end."""

from __future__ import annotations

import multiprocessing
import random
import sys
from time import sleep
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trainer.lives import STEPS, live

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")


@pytest.fixture(scope="module")
def context() -> Any:
    """Processes that are forked from one that has imported torch, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.lives"])
    return context


def one_life(context: Any, directory: Path, draw: random.Random) -> bool:
    """Start the training and kill it after some batches and some milliseconds; whether that came in time."""
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(str(directory), writer))
    process.start()
    writer.close()
    try:
        for _ in range(draw.randrange(20)):
            reader.recv_bytes()
        sleep(draw.uniform(0, 0.02))
        process.kill()
    except EOFError:  # it came to its end before
        pass
    process.join(60)
    reader.close()
    return bool(process.exitcode)


def assert_kept(directory: Path) -> None:
    """What was announced is there, whole, and not older."""
    lines = (directory / "announced").read_text().splitlines() if (directory / "announced").exists() else []
    announced = [line.split() for line in lines]
    for name in ("last.pt", "best.pt"):
        steps = [int(step) for step, file in announced if file == name]
        if steps:
            assert torch.load(directory / name, weights_only=True)["step"] >= steps[-1]


def die(context: Any, directory: Path, *, kills: int, seed: int) -> tuple[int, int]:
    """Kill trainings until there were so many kills; how many came amid a write, and how many trainings there were."""
    draw = random.Random(seed)
    (directory / "whole").mkdir()
    straight = context.Process(target=live, args=(str(directory / "whole"),))
    straight.start()
    straight.join(60)
    expected = torch.load(directory / "whole" / "weights.pt", weights_only=True)
    killed = within = runs = 0
    while killed < kills:
        runs += 1
        run = directory / str(runs)
        run.mkdir()
        while one_life(context, run, draw):
            killed += 1
            within += any(run.glob(".*.tmp"))
            assert_kept(run)
        assert not list(run.glob(".*.tmp"))
        assert torch.load(run / "last.pt", weights_only=True)["step"] == STEPS
        weights = torch.load(run / "weights.pt", weights_only=True)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    return within, runs


def test_killed_ten_times(context: Any, tmp_path: Path) -> None:
    """The last checkpoint can be read, and is not older than the last one told; the end is the same as without."""
    die(context, tmp_path, kills=10, seed=random.randrange(1000))


@pytest.mark.long
def test_killed_fifty_times(context: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, and some of the kills come amid the writing of a file."""
    within, runs = die(context, tmp_path, kills=50, seed=random.randrange(1000))
    with capsys.disabled():
        print(f"\n50 or more kills of {runs} trainings, {within} of them amid a write")
    assert within
