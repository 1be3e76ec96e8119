"""One process of a run fails: the others end soon, and say who it was and why; the original traceback comes first."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

from eventbus import EventBus
from tests.trainer.toys import Recorder, assert_balanced, batches, linear, make_trainer, squared_error
from trainer import RankFailedError, departure, ranks

if TYPE_CHECKING:
    from tests.trainer.pair import Pair

ROOT = Path(__file__).parents[2]
#: How long a failed process keeps its connections, waiting to see the other end (s).
LINGERS_S = 30.0


def lingers_until(path: Path) -> bool:
    """Wait, as a script that catches its error may; whether the other process ended meanwhile."""
    end = monotonic() + LINGERS_S
    while not path.exists() and monotonic() < end:
        sleep(0.01)
    return path.exists()


class Breaking:
    """A loader, a loss or a hook that fails in the third batch of one rank."""

    def __init__(self, rank: int) -> None:
        self.is_wanted = rank == 1
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.is_wanted and self.calls == 3:
            raise LookupError("gone")


def failing(place: str, breaking: Breaking, trainer: Any) -> tuple[Any, Any]:
    """Let one thing fail; returns the loaders to train with and to validate on."""
    train, val = batches(6), batches(3)
    if place == "queued":

        async def fail(event: Any) -> None:
            breaking()

        trainer.bus.subscribe(fail, "on_train_batch_end", rank="all", on_error="raise")
    elif place == "loss":
        trainer.loss_fn = lambda model, batch: (breaking(), squared_error(model, batch))[1]
    elif place in ("on_train_batch_end", "on_val_batch_end", "on_fit_epoch_end"):
        trainer.bus.subscribe(breaking, place, on_error="raise")
    elif place == "train_loader":
        train = Checked(train, breaking)
    else:
        val = Checked(val, breaking)
    return train, val


class Checked:
    def __init__(self, data: list[Any], check: Any) -> None:
        self.data, self.check = data, check

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        for batch in self.data:
            self.check()
            yield batch


def one_fails(rank: int, place: str, directory: str) -> dict[str, Any]:
    """Rank 1 fails and stays there, connected, until rank 0 has ended."""
    ended = Path(directory) / "rank-0-ended"
    with EventBus(run="r") as bus:
        seen = Recorder(bus)
        model = torch.nn.parallel.DistributedDataParallel(linear())
        trainer = make_trainer(bus, model=model)
        loaders = failing(place, Breaking(rank), trainer)
        told: dict[str, Any] = {}
        try:
            trainer.fit(*loaders, epochs=4 if place != "queued" else 10_000)  # that one comes when it is delivered
        except (LookupError, RankFailedError) as error:
            told |= {"error": repr(error), "text": str(error), "cause": type(error.__cause__).__name__, "at": time()}
        if rank == 1:
            told["other_ended"] = lingers_until(ended)
        else:
            ended.touch()
    assert_balanced(seen.hooks)
    exception = seen.one("on_exception")
    return told | {"exception": (exception.type, exception.message), "reason": seen.one("on_train_end").reason}


@pytest.mark.parametrize(
    "place",
    ["loss", "on_train_batch_end", "on_val_batch_end", "on_fit_epoch_end", "train_loader", "val_loader", "queued"],
)
def test_E6_a_rank_that_fails_and_lingers_does_not_keep_the_other(place: str, pair: Pair, tmp_path: Path) -> None:
    """C10, E5, E6: in a backward pass, at the fixed point or at the end of an epoch, the other ends, and names it."""
    zero, one = pair.run(one_fails, tmp_path, place, str(tmp_path))
    assert one["error"] == "LookupError('gone')"
    assert one["other_ended"]
    by = f"; raised by inline subscriber 'Breaking' on {place}" if place.startswith("on_") else ""
    told = f"Rank 1 failed: LookupError: gone{by} (its log has the traceback)"
    assert zero["text"] == told if place != "queued" else zero["text"].startswith("Rank 1 failed: LookupError: gone; ")
    assert zero["exception"] == ("RankFailedError", zero["text"])
    assert one["exception"] == ("LookupError", "gone")
    assert zero["reason"] == one["reason"] == "failed"
    assert zero["cause"] == "RuntimeError"
    print(f"{place}: rank 0 ended {zero['at'] - one['at']:.2f} s after rank 1")


def both_fail(rank: int) -> list[Any]:
    """Both make the same mistake in the same place, catch it, and train again in the same group, more slowly."""
    told: list[Any] = []
    with EventBus(run="r") as bus:
        trainer = make_trainer(bus, model=torch.nn.parallel.DistributedDataParallel(linear()), monitor="val/nothing")
        try:
            trainer.fit(batches(2), batches(1), epochs=1)
        except ValueError as error:
            told.append(str(error))
        sleep(departure.GRACE_S * 1.5)  # what is tested is that nothing comes after it
        trainer = make_trainer(bus, model=torch.nn.parallel.DistributedDataParallel(linear()))
        told.append(trainer.fit(batches(2), batches(1), epochs=1).reason)
    return told


def test_ranks_that_fail_alike_may_train_again(pair: Pair, tmp_path: Path) -> None:
    """Each raises its own error, and the group is as good as before."""
    zero, one = pair.run(both_fail, tmp_path)
    assert zero == one
    assert zero[0].startswith("monitor='val/nothing' is no metric of this run.")
    assert zero[1] == "completed"


def interrupts(rank: int, directory: str) -> list[str]:
    """Ctrl-C on rank 1 alone, which lingers."""
    ended = Path(directory) / "rank-0-ended"
    with EventBus(run="r") as bus:
        seen = Recorder(bus, "on_train_end", "on_exception")
        trainer = make_trainer(bus, model=torch.nn.parallel.DistributedDataParallel(linear()))

        def press(t: Any) -> None:
            if rank == 1 and t.step == 2:
                raise KeyboardInterrupt

        trainer.add_callback("on_train_batch_start", press)
        try:
            trainer.fit(batches(6), epochs=4)
        except (KeyboardInterrupt, RankFailedError) as error:
            told = [str(error)]
        if rank == 1:
            assert lingers_until(ended)
        ended.touch()
    return [*told, seen.one("on_train_end").reason]


def test_ctrl_c_on_one_rank_ends_the_other(pair: Pair, tmp_path: Path) -> None:
    zero, one = pair.run(interrupts, tmp_path, str(tmp_path))
    assert zero == ["Rank 1 failed: KeyboardInterrupt (its log has the traceback)", "failed"]
    assert one == ["", "interrupted"]


def keeps_other_connections(rank: int) -> bool:
    """What this process has open besides is none of its business."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        assert (client.getsockname(), client.getpeername()) in departure.connections()
        trainer = make_trainer(None, model=torch.nn.parallel.DistributedDataParallel(linear()))
        with contextlib.suppress(LookupError, RankFailedError):
            trainer.loss_fn = Breaking(rank)
            trainer.fit(batches(6), epochs=1)
        sleep(departure.GRACE_S * 1.5)
        with pytest.raises(RuntimeError):
            distributed.barrier()
        client.sendall(b"still there")
        return accepted.recv(100) == b"still there"


def test_only_connections_between_the_ranks_are_shut_down(pair: Pair, tmp_path: Path) -> None:
    assert pair.run(keeps_other_connections, tmp_path) == (True, True)


def talks_after_its_end(rank: int) -> list[Any]:
    """A hook of the failed run asks for a validation, which takes all, and for a checkpoint of its own."""
    told: list[Any] = []
    with EventBus(run="r") as bus:
        trainer = make_trainer(bus, model=torch.nn.parallel.DistributedDataParallel(linear()))
        trainer.loss_fn = lambda model, batch: (breaking(), squared_error(model, batch))[1]
        breaking = Breaking(rank)

        def hook(t: Any) -> None:
            with pytest.raises(RuntimeError) as raised:
                t.validate(batches(1))
            told.append(str(raised.value).partition(":")[0])

        trainer.add_callback("on_exception", hook)
        with contextlib.suppress(LookupError, RankFailedError):
            trainer.fit(batches(6), epochs=1)
    return told


def test_E5_nothing_that_takes_all_can_be_done_after_a_failure(pair: Pair, tmp_path: Path) -> None:
    """It is refused at once, instead of waiting for processes that will not come."""
    told = ["This process has left the others, since its run failed"]
    assert pair.run(talks_after_its_end, tmp_path) == (told, told)


class PosesAsNCCL:
    """`torch.distributed`, but for the name of the backend."""

    def get_backend(self) -> str:
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed, name)


def agrees_over_a_group_of_its_own(rank: int) -> list[str]:
    """As where the default group is NCCL's: the trainer has a gloo group of its own, and leaves that one alone."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch, EventBus(run="r") as bus:
        monkeypatch.setattr(ranks, "distributed", PosesAsNCCL())
        trainer = make_trainer(bus)
        bus.subscribe(Breaking(rank), "on_train_batch_end", on_error="raise")
        try:
            trainer.fit(batches(6), epochs=1)
        except (LookupError, RankFailedError) as error:
            told.append(type(error).__name__)
        if rank == 1:
            sleep(departure.GRACE_S * 1.5)
        distributed.barrier()
        told.append("met at the default group")
    return told


def test_a_group_of_its_own_is_the_only_one_it_leaves(pair: Pair, tmp_path: Path) -> None:
    zero, one = pair.run(agrees_over_a_group_of_its_own, tmp_path)
    assert zero == ["RankFailedError", "met at the default group"]
    assert one == ["LookupError", "met at the default group"]


# ------------------------------------------------------------------------------------------------ whole processes

_TRAINING = """
import sys, time
from pathlib import Path
import torch
from eventbus import EventBus
from tests.trainer.pair import grouped
from tests.trainer.toys import batches, linear, make_trainer, squared_error

rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
calls = 0

def loss(model, batch):
    global calls
    calls += 1
    if rank == 1 and calls == 3:
        if mode == "killed":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("gone")
    return squared_error(model, batch)

bus = EventBus(run="r")

@bus.on("on_exception")
async def slowly(event):
    sys.stderr.write(f"told of {event.type}\\n")

with grouped(rank, store):
    model = torch.nn.parallel.DistributedDataParallel(linear())
    make_trainer(bus, model=model, loss=loss).fit(batches(6), epochs=2)
"""


def processes(mode: str, directory: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of the script on both ranks."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", dedent(_TRAINING), str(rank), str(directory / "store"), mode],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [(process.wait(), text) for process in started for text in [process.communicate(timeout=60)[1]]]


def test_E6_the_original_traceback_comes_first_and_both_exit_with_an_error(tmp_path: Path) -> None:
    """E6: before subscribers are told, and before anything waits; the other process names rank and error."""
    (zero, said_by_zero), (one, said_by_one) = processes("raises", tmp_path)
    assert (zero, one) == (1, 1)
    assert said_by_one.startswith("Rank 1 failed, which ends the other processes too.\nTraceback (most recent call")
    assert said_by_one.index("LookupError: gone") < said_by_one.index("told of LookupError")
    assert said_by_zero.rstrip().endswith(
        "trainer.departure.RankFailedError: Rank 1 failed: LookupError: gone (its log has the traceback)"
    )
    assert "told of RankFailedError" in said_by_zero


def test_a_rank_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    """Nobody could say why."""
    (zero, said), (one, _) = processes("killed", tmp_path)
    assert (zero, one) == (1, -9)
    assert "Another process of the run is gone without a word, or takes too long: look at its log." in said
