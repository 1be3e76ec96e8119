"""G9: a number on a GPU is published without waiting for it, and read once, when it has arrived; without torch too."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import math
import pickle
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import CloseReport, Event, EventBus, Log, OptimizerStep, TrainBatchEnd, TrainEnd, encode
from tests.eventbus import fake_torch
from tests.eventbus.fake_torch import Device, Tensor
from tests.eventbus.samples import assert_balanced
from tests.eventbus.waiting import until, until_in_task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_torch.install(monkeypatch)


@pytest.fixture
def gpu(torch: Any) -> Device:
    return Device()


def batch_end(step: int = 0, **metrics: Any) -> TrainBatchEnd:
    return TrainBatchEnd(epoch=0, batch=step, step=step, metrics=metrics)


class Losses:
    """A sink, an async and a thread subscriber, and the losses that each of them saw."""

    hooks: Sequence[str] = ("on_train_batch_end",)
    options: dict[str, Any] = {"maxsize": 100_000}

    def __init__(self, bus: EventBus) -> None:
        self.task: list[float] = []
        self.thread: list[float] = []
        self.sink: list[float] = []
        bus.subscribe(self.in_a_task, "on_train_batch_end", maxsize=100_000)
        bus.subscribe(self.in_a_thread, "on_train_batch_end", maxsize=100_000, run_in="thread")
        bus.attach(self)

    async def in_a_task(self, event: TrainBatchEnd) -> None:
        self.task.append(event.metrics["loss"])

    def in_a_thread(self, event: TrainBatchEnd) -> None:
        self.thread.append(event.metrics["loss"])

    async def open(self) -> None: ...
    async def aclose(self) -> None: ...
    async def write(self, events: Sequence[Event]) -> None:
        self.sink += [event.metrics["loss"] for event in events if isinstance(event, TrainBatchEnd)]

    def assert_seen(self, losses: Sequence[float]) -> None:
        assert self.task == self.thread == self.sink == list(losses)


@pytest.fixture
def running_gpu(gpu: Device) -> Iterator[Device]:
    """A GPU that works on its own, as real ones do."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            gpu.run()
            done.wait(0.0002)

    thread = threading.Thread(target=work)
    thread.start()
    yield gpu
    done.set()
    thread.join()


# ------------------------------------------------------------------------------------------------- no waiting


def test_G9_publishing_a_number_on_a_gpu_does_not_wait_for_it(gpu):
    """`publish` returns while the GPU has not got to the number, and every subscriber sees it once that has."""
    bus = EventBus()
    losses = Losses(bus)
    with bus:
        for step in range(20):
            bus.publish(batch_end(step, loss=Tensor(step / 2, gpu)))
        assert bus.flush(0.1) is False
        losses.assert_seen([])
        gpu.run()
        assert bus.flush()
    losses.assert_seen([step / 2 for step in range(20)])
    assert gpu.waits == 0


def test_G9_a_number_is_read_once_for_all_subscribers(gpu):
    """Five sinks and ten other subscribers make no more copies than one does."""
    bus = EventBus()
    all_losses = [Losses(bus) for _ in range(5)]
    with bus:
        bus.publish(batch_end(1, loss=Tensor(0.5, gpu), accuracy=Tensor(0.25, gpu)))
        gpu.run()
        assert bus.flush()
    for losses in all_losses:
        losses.assert_seen([0.5])
    assert (gpu.copies, gpu.waits) == (2, 0)


def test_G9_what_is_seen_is_the_number_at_publish(gpu):
    """The training loop may go on and change the tensor in place: the copy comes before that on its stream."""
    bus = EventBus()
    losses = Losses(bus)
    with bus:
        loss = Tensor(1.0, gpu)
        for step in range(5):
            bus.publish(batch_end(step, loss=loss))
            loss.set_(step + 2.0)
        gpu.run()
        assert bus.flush()
    losses.assert_seen([1.0, 2.0, 3.0, 4.0, 5.0])


def test_G9_numbers_keep_their_type_and_their_place(gpu):
    """Integers, booleans, plain fields, tuples and nested values arrive as the Python numbers they stand for."""
    bus, seen = EventBus(), []
    on_gpu = functools.partial(Tensor, device=gpu)
    values = {"n": on_gpu(3, dtype="torch.int64"), "yes": on_gpu(1, dtype="torch.bool"), "deep": {"x": [on_gpu(0.5)]}}

    @bus.on("optimizer_step", "on_log")
    async def note(event: Any) -> None:
        seen.append(event)

    with bus:
        bus.publish(OptimizerStep(epoch=0, batch=0, step=0, lr=(on_gpu(0.1), 0.2), grad_norm=on_gpu(7.5)))
        bus.publish(Log(step=0, values=values))
        gpu.run()
        assert bus.flush()
    update, log = seen
    assert (update.lr, update.grad_norm) == ((0.1, 0.2), 7.5)
    assert log.values == {"n": 3, "yes": True, "deep": {"x": (0.5,)}}
    assert [type(log.values[key]) for key in ("n", "yes")] == [int, bool]


def test_G9_nothing_is_converted_when_nobody_listens(gpu):
    """No subscriber, only subscribers of other hooks, or of another rank: the tensor is not even looked at."""

    class Untouchable(Tensor):
        def __getattribute__(self, name: str) -> Any:
            if name != "__class__":
                pytest.fail(f"{name} of a tensor that nobody wants was read")
            return super().__getattribute__(name)

    async def note(event: Event) -> None: ...

    silent = EventBus()
    elsewhere = EventBus()
    elsewhere.subscribe(note, "on_log", "on_val_*")
    elsewhere.subscribe(lambda event: None, "on_train_end")
    other_rank = EventBus(rank=1)
    other_rank.subscribe(note, "on_train_batch_end")
    closed = EventBus()
    closed.subscribe(note, "on_train_batch_end")
    closed.close()
    for bus in silent, elsewhere, other_rank, closed:
        bus.publish(batch_end(1, loss=Untouchable(0.5, gpu)))
    assert (gpu.copies, gpu.waits) == (0, 0)


def test_G9_larger_tensors_are_not_copied(gpu):
    """A whole tensor becomes a text that says what it was."""
    bus, seen = EventBus(), []
    bus.subscribe(lambda event: seen.append(event.values["image"]), "on_log")
    bus.publish(Log(step=0, values={"image": Tensor([1.0, 2.0], gpu)}))
    assert "Tensor float32" in seen[0]
    assert (gpu.copies, gpu.waits) == (0, 0)


def test_G9_later_events_do_not_overtake_one_whose_number_is_on_its_way(gpu):
    """Order is kept: what was published behind it waits with it, and no longer."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end", "on_log")
    async def note(event: Any) -> None:
        seen.append(event.step)

    with bus:
        bus.publish(Log(step=0))
        bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
        bus.publish(Log(step=2))
        until(lambda: seen)
        assert bus.flush(0.05) is False
        assert seen == [0]
        gpu.run()
        assert bus.flush()
    assert seen == [0, 1, 2]


@pytest.mark.anyio
async def test_G9_a_host_loop_goes_on_while_a_number_is_on_its_way(gpu):
    """Waiting for the GPU is asking again now and then, on the service's own loop too; so is `stats`."""
    bus, seen, beats = EventBus(), [], 0

    @bus.on("on_train_batch_end")
    async def note(event: TrainBatchEnd) -> None:
        seen.append(event.metrics["loss"])

    async with bus:
        bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
        with anyio.fail_after(5.0):
            while beats < 50:
                await anyio.sleep(0.001)
                beats += 1
        assert bus.stats().popitem()[1].delivered == 0
        gpu.run()
        await until_in_task(lambda: seen)
    assert seen == [0.5]


def test_G9_memory_for_numbers_is_used_again(torch, running_gpu):
    """Thousands of events need no more pinned memory than those that are on their way at once."""
    bus = EventBus()
    losses = Losses(bus)
    with bus:
        for step in range(5000):
            bus.publish(batch_end(step, loss=Tensor(float(step), running_gpu)))
            if step % 200 == 0:
                assert bus.flush()
    losses.assert_seen([float(step) for step in range(5000)])
    assert torch.blocks == 1


# ------------------------------------------------------------------------------------------------- inline hooks


def test_G9_an_inline_hook_pays_only_for_the_key_it_reads(gpu):
    """Looking at other keys, at the names or at how many there are waits for nothing; reading the number does."""
    bus, waits = EventBus(), {}

    def measured(name: str, read: Any) -> None:
        def hook(event: TrainBatchEnd) -> None:
            before = gpu.waits
            read(event)
            waits[name] = gpu.waits - before

        bus.subscribe(hook, "on_train_batch_end")

    measured("nothing", lambda event: event.step)
    measured("another key", lambda event: event.metrics["lr"])
    measured("names", lambda event: (list(event.metrics), len(event.metrics), "loss" in event.metrics))
    measured("a key that is not there", lambda event: event.metrics.get("none"))
    measured("the number", lambda event: event.metrics["loss"])
    measured("the number again", lambda event: event.metrics["loss"])
    bus.publish(batch_end(1, lr=0.1, loss=Tensor(0.5, gpu)))
    assert waits == {
        "nothing": 0, "another key": 0, "names": 0, "a key that is not there": 0,
        "the number": 1, "the number again": 0,
    }  # fmt: skip


def test_G9_an_inline_hook_pays_only_for_the_field_it_reads(gpu):
    """A number that is a field of its own waits for no more than one in a mapping."""
    bus, waits = EventBus(), {}

    def measured(name: str, read: Any) -> None:
        def hook(event: OptimizerStep) -> None:
            before = gpu.waits
            read(event)
            waits[name] = gpu.waits - before

        bus.subscribe(hook, OptimizerStep, on_error="raise")

    def check_number(event: OptimizerStep) -> None:
        assert (event.grad_norm, event.lr) == (7.5, (0.5, 0.2))

    def check_copies(event: OptimizerStep) -> None:
        assert pickle.loads(pickle.dumps(event)) == copy.deepcopy(event)
        assert json.loads(encode(event))["grad_norm"] == 7.5
        assert "grad_norm=7.5" in repr(event)

    measured("other fields", lambda event: (event.step, event.hook, event.seq))
    measured("the class", lambda event: (isinstance(event, OptimizerStep), type(event).__name__ == "OptimizerStep"))
    measured("the number", check_number)
    measured("the number again", check_number)
    measured("copies", check_copies)
    lr = (Tensor(0.5, gpu), 0.2)
    bus.publish(OptimizerStep(epoch=0, batch=0, step=1, lr=lr, grad_norm=Tensor(7.5, gpu)))
    assert waits == {"other fields": 0, "the class": 0, "the number": 1, "the number again": 0, "copies": 0}


@pytest.mark.parametrize(
    "read",
    [
        lambda metrics: metrics,
        dict,
        lambda metrics: {**metrics},
        lambda metrics: {} | metrics,
        lambda metrics: metrics | {},
        lambda metrics: dict(metrics.items()),
        lambda metrics: dict(zip(metrics.keys(), metrics.values(), strict=True)),
        lambda metrics: {key: metrics[key] for key in metrics},
        lambda metrics: {key: metrics.get(key) for key in metrics},
        lambda metrics: metrics.copy(),
        copy.copy,
        copy.deepcopy,
        lambda metrics: pickle.loads(pickle.dumps(metrics)),
        lambda metrics: json.loads(json.dumps(metrics)),
        lambda metrics: (lambda **given: given)(**metrics),
        lambda metrics: eval(repr(metrics)),
    ],
)
def test_G9_however_an_inline_hook_reads_it_it_gets_numbers(gpu, read):
    """A mapping whose numbers are on their way gives them in each of the ways a dict can be read."""
    bus, seen = EventBus(), []
    bus.subscribe(lambda event: seen.append(read(event.metrics)), "on_train_batch_end", on_error="raise")
    bus.publish(batch_end(1, loss=Tensor(0.5, gpu), lr=0.1))
    assert seen == [{"loss": 0.5, "lr": 0.1}]
    assert type(dict.__getitem__(dict(seen[0]), "loss")) is float


def test_G9_an_inline_hook_may_encode_its_event(gpu):
    """JSON made in a hook holds the number."""
    bus, seen = EventBus(), []
    bus.subscribe(lambda event: seen.append(json.loads(encode(event))), "on_train_batch_end", on_error="raise")
    bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
    assert seen[0]["metrics"] == {"loss": 0.5}


def test_G9_an_inline_hook_may_keep_what_it_was_given(gpu):
    """Read long after, when the others have seen the number too, it is still that number."""
    bus, kept = EventBus(), []
    losses = Losses(bus)
    bus.subscribe(lambda event: kept.append(event.metrics), "on_train_batch_end")
    with bus:
        for step in range(10):
            bus.publish(batch_end(step, loss=Tensor(float(step), gpu)))
        gpu.run()
        assert bus.flush()
        for step in range(10, 3000):  # all slots are used again meanwhile
            bus.publish(batch_end(step, loss=Tensor(-1.0, gpu)))
            gpu.run()
    assert [metrics["loss"] for metrics in kept[:10]] == [float(step) for step in range(10)]
    assert losses.task[:10] == [float(step) for step in range(10)]
    assert gpu.waits == 0


def test_G9_secrets_stay_hidden_beside_a_number_on_its_way(gpu):
    """An inline hook sees no more of a mapping because one of its numbers is on a GPU."""
    bus, seen = EventBus(), []
    bus.subscribe(lambda event: seen.append(dict(event.values)), "on_log")
    values = {"api_key": "s3cret", "num_tokens": Tensor(5, gpu, "torch.int64"), "url": "https://me:pw@host/"}
    bus.publish(Log(step=0, values=values))
    assert seen == [{"api_key": "[redacted]", "num_tokens": 5, "url": "https://[redacted]@host/"}]


def test_G9_two_readers_of_one_number_free_its_slot_once(gpu, monkeypatch):
    """While a hook reads the number the bus side reads it too; the numbers behind it do not share a slot after that."""
    bus = EventBus()
    losses = Losses(bus)

    def let_the_others_read() -> None:
        monkeypatch.setattr(Tensor, "on_read", staticmethod(lambda: None))
        assert bus.flush()

    def hook(event: TrainBatchEnd) -> None:
        if event.step == 0:
            gpu.run()
            monkeypatch.setattr(Tensor, "on_read", staticmethod(let_the_others_read))
            assert event.metrics["loss"] == 0.0

    bus.subscribe(hook, "on_train_batch_end", on_error="raise")
    with bus:
        for step in range(1500):  # more than were ever free, so that each slot is taken again
            bus.publish(batch_end(step, loss=Tensor(float(step), gpu)))
        gpu.run()
    losses.assert_seen([float(step) for step in range(1500)])


def test_G9_a_hook_and_the_bus_side_may_read_a_number_at_the_same_time(running_gpu):
    """Two threads after one number each get it, and its slot is free once, not twice."""
    bus, seen = EventBus(), []
    losses = Losses(bus)
    bus.subscribe(lambda event: seen.append(event.metrics["loss"]), "on_train_batch_end")
    with bus:
        for step in range(3000):
            bus.publish(batch_end(step, loss=Tensor(float(step), running_gpu)))
    assert seen == [float(step) for step in range(3000)]
    losses.assert_seen(seen)


# --------------------------------------------------------------------------------------------- a GPU that hangs


def test_G9_a_gpu_that_hangs_is_given_up(gpu, monkeypatch):
    """A number that does not come is NaN at last, and the events behind it are delivered."""
    monkeypatch.setattr("eventbus.log._DEVICE_WAIT_S", 0.1)
    bus = EventBus()
    losses = Losses(bus)
    with bus:
        bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
        bus.publish(batch_end(2, loss=2.0))
        assert bus.flush()
    assert math.isnan(losses.task[0])
    assert losses.task[1:] == [2.0]
    assert gpu.waits == 0


def test_G9_close_does_not_wait_for_a_gpu_that_hangs(gpu):
    """Within its timeout it is back, and what could not be delivered is counted as left."""
    bus = EventBus()
    losses = Losses(bus)
    bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
    bus.publish(batch_end(2, loss=2.0))
    report = bus.close(0.2)
    assert not report.ok
    assert set(report.left.values()) == {2}
    losses.assert_seen([])
    assert gpu.waits == 0
    assert_balanced(bus)


def test_G9_close_waits_for_a_gpu_that_is_slow(gpu):
    """What arrives in time is delivered with its number."""
    bus = EventBus()
    losses = Losses(bus)
    bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
    late = threading.Timer(0.1, gpu.run)
    late.start()
    assert bus.close(5.0) == CloseReport(ok=True, left={})
    late.join()
    losses.assert_seen([0.5])


# --------------------------------------------------------------------------------------------- a GPU that broke


class BrokenError(RuntimeError):
    """CUDA error: device-side assert triggered."""


def test_G9_an_inline_hook_reads_nan_after_a_cuda_error(gpu, monkeypatch):
    """Neither asking nor waiting for the number raises in the hook: the error is the training's to meet."""

    def fail(event: object) -> None:
        raise BrokenError

    for method in "query", "synchronize":
        bus, seen = EventBus(), []
        bus.subscribe(lambda event, seen=seen: seen.append((event.metrics["loss"], event.metrics["lr"])), TrainBatchEnd)
        with monkeypatch.context() as patch:
            patch.setattr(fake_torch.Event, method, fail)
            bus.publish(batch_end(1, loss=Tensor(0.5, gpu), lr=0.1))
        assert math.isnan(seen[0][0])
        assert seen[0][1] == 0.1
        assert bus.stats().popitem()[1].delivered == 1
        gpu.run()


@pytest.mark.parametrize("call", ["Tensor.copy_", "Event.record", "Event.query"])
def test_G9_after_a_cuda_error_the_events_still_arrive(gpu, monkeypatch, call):
    """Every call to the GPU raises from some moment on: publishing does not, and the end of the run is told."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end", "on_train_end")
    async def note(event) -> None:
        seen.append(event)

    with bus:
        gpu.run()
        bus.publish(batch_end(1, loss=Tensor(0.5, gpu)))
        if call != "Event.query":
            gpu.run()
            assert bus.flush()

        def fail(*args: object, **options: object) -> None:
            raise BrokenError

        kind, method = call.split(".")
        monkeypatch.setattr({"Tensor": Tensor, "Event": fake_torch.Event}[kind], method, fail)
        bus.publish(batch_end(2, loss=Tensor(1.5, gpu), lr=0.1))
        bus.publish(batch_end(3, loss=2.5))
        bus.publish(TrainEnd(reason="failed"))
        assert bus.flush()
        bus.publish(batch_end(4, loss=3.5))
        assert bus.flush()
    assert [event.hook for event in seen] == [*["on_train_batch_end"] * 3, "on_train_end", "on_train_batch_end"]
    lost = seen[1].metrics["loss"]
    assert lost == "<tests.eventbus.fake_torch.Tensor: BrokenError>" if call == "Tensor.copy_" else math.isnan(lost)
    assert seen[1].metrics["lr"] == 0.1
    assert [event.metrics["loss"] for event in (seen[2], seen[4])] == [2.5, 3.5]
    assert_balanced(bus)


# ---------------------------------------------------------------------------------------------------- a real GPU


def has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif("not has_cuda()")
def test_G9_a_real_gpu_is_never_synchronised_by_publish():
    """With torch's own check on, publishing CUDA numbers of every type passes, and their values are right."""
    import torch

    bus, seen, inline = EventBus(), [], []

    @bus.on("on_train_batch_end", maxsize=10_000)
    async def note(event: TrainBatchEnd) -> None:
        seen.append(dict(event.metrics))

    bus.subscribe(lambda event: inline.append(len(event.metrics)), "on_train_batch_end")
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
    with bus:
        bus.publish(batch_end(0, warm=torch.ones((), device="cuda")))
        assert bus.flush()
        loss = torch.zeros((), device="cuda")
        numbers = {str(dtype): torch.ones((1,), dtype=dtype, device="cuda") for dtype in dtypes}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1000):
                bus.publish(batch_end(step, loss=loss, **numbers))
                loss += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bus.flush()
    assert [metrics["loss"] for metrics in seen[1:]] == [float(step) for step in range(1000)]
    assert all(metrics[str(dtype)] == 1 for metrics in seen[1:] for dtype in dtypes)
    assert [type(seen[1][str(dtype)]) for dtype in dtypes] == [float] * 4 + [int] * 2 + [bool]
    assert inline == [1] + [8] * 1000
