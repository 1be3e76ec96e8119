"""Control, signals and subscribers in a run of two processes, and trainers that were sent to them."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

from eventbus import EventBus, NotPicklableError
from sinks import CSVSink, JSONLSink, read_jsonl
from tests.trainer.test_ranks import parallel
from tests.trainer.toys import Recorder, batches, make_trainer
from trainer import Callback

if TYPE_CHECKING:
    from tests.trainer.pair import Pair


# --------------------------------------------------------------------------------------------------------- control


def paused_and_resumed(rank: int, directory: str) -> dict[str, Any]:
    """Rank 1 pauses; while both are held a thread of rank 0 asks for a rate and a checkpoint, then lets them go on."""
    heard: list[str] = []
    with EventBus(run="r") as bus:
        seen = Recorder(bus, "on_control", "on_train_batch_end")

        @bus.on("on_control")
        async def note(event: Any) -> None:
            heard.append(event.action)

        def ask(event: Any) -> None:
            if rank == 1 and event.global_batch == 1:
                bus.control.pause("look", requester="rank 1")

        def go_on() -> None:
            bus.control.set_lr(0.01, run="r", requester="rank 0").result(20)
            bus.control.save(run="r").result(20)
            bus.control.resume("seen", run="r", requester="rank 0").result(20)

        threads = [threading.Thread(target=go_on)]
        bus.subscribe(lambda event: threads[0].start(), "on_control", when=partial(is_pause_on, 0), once=True)
        bus.subscribe(ask, "on_train_batch_end")
        result = parallel(bus, save_dir=directory).fit(batches(4), epochs=1)
        if rank == 0:
            threads[0].join()
    told = [(e.action, e.accepted, e.requester, e.reason, e.step, e.detail) for e in seen.of("on_control")]
    rates = [event.lr[0] for event in seen.of("on_train_batch_end")]
    return {"told": told, "rates": rates, "end": (result.reason, result.step), "heard": heard}


def is_pause_on(rank: int, event: Any) -> bool:
    return bool(event.action == "pause" and event.rank == rank)


def test_a_pause_holds_all_and_another_rank_may_end_it(pair: Pair, tmp_path: Path) -> None:
    """All requests are applied on both, in the same order at the same step, and told once by the bus of rank 0."""
    zero, one = pair.run(paused_and_resumed, tmp_path, str(tmp_path))
    assert zero["told"] == one["told"] == [
        ("pause", True, "rank 1", "look", 2, ""),
        ("set_lr", True, "rank 0", "", 2, "0.01"),
        ("save", True, None, "", 2, str(tmp_path / "last.pt")),
        ("resume", True, "rank 0", "seen", 2, ""),
    ]  # fmt: skip
    assert zero["rates"] == one["rates"] == [0.1, 0.1, 0.01, 0.01]
    assert zero["end"] == one["end"] == ("completed", 4)
    assert zero["heard"] == ["pause", "set_lr", "save", "resume"]
    assert one["heard"] == []


def asks_for_what_cannot_be(rank: int, directory: str) -> list[Any]:
    """Rank 1 asks for a checkpoint that rank 0 cannot write, and for a value that cannot be told."""
    with EventBus(run="r") as bus:
        seen = Recorder(bus, "on_control")
        trainer = parallel(bus, save_dir=f"{directory}/file/runs")

        def ask(t: Any) -> None:
            if rank == 1 and t.step == 1:
                bus.control.save()
                bus.control.set("epochs", lambda: 3)
                bus.control.set("epochs", "many")

        trainer.add_callback("on_after_backward", ask)
        assert trainer.fit(batches(3), epochs=1).reason == "completed"
    return [(event.action, event.accepted, event.detail.split(":")[0]) for event in seen.of("on_control")]


def test_what_cannot_be_done_is_refused_on_all_ranks_alike(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    zero, one = pair.run(asks_for_what_cannot_be, tmp_path, str(tmp_path))
    refused = [
        ("save", False, "NotADirectoryError"),
        ("set", False, "epochs must be a whole number of at least 1, not 'many'"),
    ]
    assert zero == refused
    assert one == [("set", False, "the other processes cannot be told"), *refused]


def interrupted(rank: int, directory: str) -> list[Any]:
    """One rank gets the signal, in a step of the training or of a validation."""
    told: list[Any] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number, (name, hook, on) in enumerate(
        [("SIGTERM", "on_after_backward", 1), ("SIGUSR1", "on_train_batch_end", 0), ("SIGTERM", "on_val_batch_end", 1)]
    ):
        with EventBus(run=f"r{number}") as bus:
            seen = Recorder(bus, "on_val_batch_end")
            trainer = parallel(bus, signals=("SIGTERM", "SIGUSR1"), save_dir=f"{directory}/{number}")
            got: list[int] = []

            def kill(t: Any, number: int = getattr(signal, name), on: int = on, got: list[int] = got) -> None:
                if rank == on and t.step >= 2 and not got:
                    got.append(number)
                    os.kill(os.getpid(), number)

            trainer.add_callback(hook, kill)
            result = trainer.fit(batches(4), batches(3), epochs=2)
            saved = torch.load(trainer.last, weights_only=True)["step"] if rank == 0 else None
            told.append(((result.reason, result.stop_reason, result.step, seen.count("on_val_batch_end")), saved))
    signal.signal(signal.SIGTERM, before)
    return told


def test_a_signal_to_one_rank_interrupts_all_at_the_same_step(pair: Pair, tmp_path: Path) -> None:
    """With a checkpoint; a validation is cut short on both after the same batch."""
    zero, one = pair.run(interrupted, tmp_path, str(tmp_path))
    assert [end for end, _ in zero] == [end for end, _ in one]
    assert zero == [
        (("interrupted", "signal SIGTERM", 3, 0), 3),
        (("interrupted", "signal SIGUSR1", 2, 0), 2),
        (("interrupted", "signal SIGTERM", 4, 1), 4),
    ]


# ----------------------------------------------------------------------------------------------------- rank policy


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "reduce",
)


class Guarded:
    """Counts collectives, and by whom: the loop itself, something within `publish`, or another thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._is_publishing = threading.local()
        for name in COLLECTIVES:
            monkeypatch.setattr(distributed, name, partial(self._collective, getattr(distributed, name)))
        monkeypatch.setattr(EventBus, "publish", self._wrapped(EventBus.publish))

    def _collective(self, real: Any, *args: Any, **options: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        within = getattr(self._is_publishing, "value", False)
        self.calls.append("publish" if within else "loop" if is_main else "thread")
        return real(*args, **options)

    def _wrapped(self, real: Any) -> Any:
        def publish(bus: EventBus, event: Any) -> None:
            self._is_publishing.value = True
            try:
                real(bus, event)
            finally:
                self._is_publishing.value = False

        return publish


def heard_by_policy(rank: int, directory: str) -> dict[str, Any]:
    """Every kind of subscriber on both ranks, each reading all numbers of what it hears."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        guarded = Guarded(monkeypatch)
        with EventBus(run="r") as bus:
            bus.attach(JSONLSink(f"{directory}/events.jsonl", hooks="on_fit_epoch_end"))
            bus.attach(JSONLSink(f"{directory}/rank-{{rank}}.jsonl", hooks="on_fit_epoch_end"), rank="all")
            bus.attach(CSVSink(f"{directory}/epochs.csv"))
            assert not guarded.calls  # E11: constructing and attaching talks to nobody
            heard: dict[str, list[Any]] = {name: [] for name in ("inline", "inline 0", "async", "async all", "thread")}

            def reading(name: str) -> Any:
                def read(event: Any) -> None:
                    heard[name].append((event.rank, event.epoch, {key: float(v) for key, v in event.metrics.items()}))

                return read

            def reading_async(name: str) -> Any:
                read = reading(name)

                async def handler(event: Any) -> None:
                    read(event)

                return handler

            hook = "on_fit_epoch_end"
            bus.subscribe(reading("inline"), hook)
            bus.subscribe(reading("inline 0"), hook, rank=0)
            bus.subscribe(reading_async("async"), hook)
            bus.subscribe(reading_async("async all"), hook, rank="all")
            bus.subscribe(reading("thread"), hook, run_in="thread")
            trainer = parallel(bus, log_every=1)
            assert set(guarded.calls) == {"loop"}
            trainer.fit(batches(2, seed=rank), batches(2, seed=rank), epochs=2)
    return {"heard": heard, "collectives": set(guarded.calls)}


def test_who_hears_what_on_which_rank_and_who_talks_to_the_others(pair: Pair, tmp_path: Path) -> None:
    """E3, E4, E8, E11, E12: the policy is set at registration; no subscriber and no publish makes a collective."""
    zero, one = pair.run(heard_by_policy, tmp_path, str(tmp_path))
    assert zero["collectives"] == one["collectives"] == {"loop"}
    mine, theirs = zero["heard"], one["heard"]
    assert [(rank, epoch) for rank, epoch, _ in mine["inline"]] == [(0, 0), (0, 1)]
    assert mine["inline"] == mine["inline 0"] == mine["async"] == mine["async all"] == mine["thread"]
    assert [(rank, epoch) for rank, epoch, _ in theirs["inline"]] == [(1, 0), (1, 1)]
    assert theirs["inline"] == theirs["async all"]
    assert theirs["inline 0"] == theirs["async"] == theirs["thread"] == []
    assert [metrics for *_, metrics in mine["inline"]] == [metrics for *_, metrics in theirs["inline"]]
    # one run in the tracker, one row per step, and one file per rank where that was asked for
    assert [event.rank for event in read_jsonl(tmp_path / "events.jsonl")] == [0, 0]
    assert [event.step for event in read_jsonl(tmp_path / "events.jsonl")] == [2, 4]
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 3
    for rank in (0, 1):
        assert [event.rank for event in read_jsonl(tmp_path / f"rank-{rank}.jsonl")] == [rank, rank]


# -------------------------------------------------------------------------------------------------- sent to workers


class Counting(Callback):
    """Counts epochs, on whichever rank it arrives."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_fit_epoch_end(self, trainer: Any) -> None:
        self.epochs += 1
        trainer.metrics["seen"] = float(trainer.rank)


counted: list[tuple[str, int]] = []


def count(trainer: Any) -> None:
    counted.append(("function", trainer.rank))


async def count_async(event: Any) -> None:
    counted.append(("coroutine", event.rank))


def count_event(event: Any) -> None:
    counted.append(("hook", event.rank))


def trains_what_was_sent(rank: int, trainer: Any) -> dict[str, Any]:
    """A trainer from before there was a group, as `torch.multiprocessing.spawn` sends it."""
    counted.clear()
    trainer.model = torch.nn.parallel.DistributedDataParallel(trainer.model)
    result = trainer.fit(batches(2, seed=rank), epochs=2)
    return {
        "place": (trainer.rank, trainer.world_size, trainer.run),
        "epochs": trainer.callback_objects[0].epochs,
        "counted": sorted(counted),
        "loss": result.metrics["train/loss"],
        "weights": trainer.model.module.weight.tolist(),
    }


def test_E7_callbacks_reach_spawned_workers(pair: Pair, tmp_path: Path) -> None:
    """Also when the trainer was made before there was a process group: it finds its rank when it trains."""
    trainer = make_trainer(None, run="sent", callbacks=[Counting()], save_dir=tmp_path / "runs")
    trainer.add_callback("on_fit_epoch_end", count)
    trainer.add_callback("on_fit_epoch_end", count_async)
    trainer.bus.subscribe(count_event, "on_fit_epoch_end")
    zero, one = pair.run(trains_what_was_sent, tmp_path, trainer)
    assert (zero["place"], one["place"]) == ((0, 2, "sent"), (1, 2, "sent"))
    assert zero["epochs"] == one["epochs"] == 2
    assert zero["counted"] == [("coroutine", 0)] * 2 + [("function", 0)] * 2 + [("hook", 0)] * 2
    assert one["counted"] == [("function", 1)] * 2 + [("hook", 1)] * 2
    assert (zero["loss"], zero["weights"]) == (one["loss"], one["weights"])


@pytest.mark.parametrize("kind", ["lambda", "local function", "bus"])
def test_E7_a_callback_that_cannot_be_sent_is_an_error_that_names_it(kind: str) -> None:
    trainer = make_trainer(None)
    if kind == "lambda":
        trainer.add_callback("on_fit_epoch_end", lambda t: None)
    elif kind == "local function":

        def notify(t: Any) -> None:
            pass

        trainer.add_callback("on_fit_epoch_end", notify)
    else:

        @trainer.bus.on("on_fit_epoch_end")
        async def upload(event: Any) -> None:
            pass

    name = {"lambda": "<lambda>", "local function": "notify", "bus": "upload"}[kind]
    with pytest.raises(NotPicklableError, match=f"{name}.*"):
        pickle.dumps(trainer)


def late_with_other_runs(rank: int, trainers: list[Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        trainers[rank].fit(batches(1), epochs=1)
    return str(raised.value)


def test_trainers_of_different_runs_do_not_train_together(pair: Pair, tmp_path: Path) -> None:
    """Each process made its own, before there was a group: their callbacks and files are of different runs."""
    zero, one = pair.run(late_with_other_runs, tmp_path, [make_trainer(None, run=run) for run in ("a", "b")])
    assert zero == one
    assert zero.startswith("torch.distributed was initialised after this trainer was made")
    assert "different runs: a, b." in zero
