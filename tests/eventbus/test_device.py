"""G9: publishing a number that is on a GPU never waits for the GPU.

Where there is no GPU its place is taken by tensors that say they are on one, with events that arrive when the test
says so: the way through the bus is the same. The last tests run where CUDA is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from eventbus import Event, EventBus, TrainBatchEnd
from eventbus.device import Copies, Slots
from tests.eventbus.samples import Load
from tests.eventbus.waiting import until

torch = pytest.importorskip("torch")


class FarTensor(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor of the host that says it is on a GPU, and notes who reads it there."""

    reads: list[str] = []

    @property
    def is_cuda(self) -> bool:
        return True

    def detach(self) -> Any:
        return self.as_subclass(torch.Tensor).detach()

    def item(self) -> Any:
        FarTensor.reads.append("item")
        return super().item()

    def cpu(self, *args: Any, **options: Any) -> Any:
        FarTensor.reads.append("cpu")
        return super().cpu(*args, **options)


class Gpu:
    """The part of a GPU that a copy waits for."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.waits: list[int] = []

    def event(self) -> Any:
        gpu = self

        class Mark:
            def record(self, stream: object) -> None: ...

            def query(self) -> bool:
                return gpu.arrived.is_set()

            def synchronize(self) -> None:
                gpu.waits.append(threading.get_ident())
                assert gpu.arrived.wait(10)

        return Mark()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    real_empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: real_empty(*size, **options))
    FarTensor.reads.clear()
    yield gpu
    gpu.arrived.set()


def far(value: float) -> Any:
    return torch.tensor(value).as_subclass(FarTensor)


def batch(**metrics: Any) -> TrainBatchEnd:
    return TrainBatchEnd(epoch=0, batch=0, step=1, metrics=metrics)


def collecting(bus: EventBus, **options: Any) -> list[Any]:
    got: list[Any] = []

    async def handler(event: Event) -> None:
        got.append(event)

    bus.subscribe(handler, **options)
    return got


def test_G9_publish_does_not_read_the_tensor_or_wait_for_it(gpu: Gpu) -> None:
    """The number is delivered when it has arrived, and the publisher went on long before."""
    bus = EventBus()
    got = collecting(bus)
    bus.publish(batch(loss=far(0.5)))
    bus.publish(batch(loss=1.0))
    assert FarTensor.reads == []
    assert gpu.waits == []
    assert not bus.flush(0.05), "the events wait for the number, in order"
    assert got == []
    gpu.arrived.set()
    assert bus.flush(5)
    bus.close()
    assert [event.metrics for event in got] == [{"loss": 0.5}, {"loss": 1.0}]
    assert gpu.waits == []


def test_G9_a_number_is_read_once_for_all_subscribers(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (reads.append(1), real(self))[1])
    bus = EventBus()
    lists = [collecting(bus, name=f"s{n}") for n in range(5)]
    gpu.arrived.set()
    bus.publish(batch(loss=far(0.5)))
    assert bus.flush(5)
    bus.close()
    assert [got[0].metrics["loss"] for got in lists] == [0.5] * 5
    assert len(reads) == 1


def test_G9_an_inline_hook_waits_only_for_the_key_it_reads(gpu: Gpu) -> None:
    """Names and host numbers cost nothing; the GPU's number is waited for when it is read."""
    bus = EventBus()
    seen: list[Any] = []

    def hook(event: TrainBatchEnd) -> None:
        seen.append((sorted(event.metrics), event.metrics["host"], "loss" in event.metrics, len(event.metrics)))
        assert gpu.waits == []
        arrival = threading.Thread(target=lambda: (until(lambda: gpu.waits), gpu.arrived.set()))
        arrival.start()
        seen.append(event.metrics["loss"])
        arrival.join()

    bus.subscribe(hook, on_error="raise")
    bus.publish(batch(loss=far(0.5), host=2.0))
    assert seen == [(["host", "loss"], 2.0, True, 2), 0.5]
    assert gpu.waits == [threading.get_ident()]


def test_G9_every_way_to_read_a_mapping_gives_numbers(gpu: Gpu) -> None:
    gpu.arrived.set()
    bus = EventBus()
    seen: list[Any] = []

    def read(event: TrainBatchEnd) -> None:
        metrics: Any = event.metrics
        seen.extend([dict(metrics.items()), list(metrics.values()), metrics.get("loss"), metrics.copy()])
        seen.extend([metrics == {"loss": 0.5}, repr(metrics), metrics | {"x": 1}])

    bus.subscribe(read, on_error="raise")
    bus.publish(batch(loss=far(0.5)))
    assert seen == [{"loss": 0.5}, [0.5], 0.5, {"loss": 0.5}, True, "{'loss': 0.5}", {"loss": 0.5, "x": 1}]


def test_G9_kinds_of_numbers_are_kept_and_larger_tensors_stay_where_they_are(gpu: Gpu) -> None:
    gpu.arrived.set()
    bus = EventBus()
    got = collecting(bus)
    whole, flag = torch.tensor(7).as_subclass(FarTensor), torch.tensor(True).as_subclass(FarTensor)
    grid = torch.zeros(2, 3).as_subclass(FarTensor)
    bus.publish(Load(value={"whole": whole, "flag": flag, "nested": [far(0.5)], "grid": grid}))
    assert bus.flush(5)
    bus.close()
    value = got[0].value
    assert (value["whole"], value["flag"], value["nested"]) == (7, True, (0.5,))
    assert type(value["whole"]) is int
    assert type(value["flag"]) is bool
    assert "float32[2, 3]" in value["grid"]


def test_G9_nothing_is_copied_when_nobody_listens(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    monkeypatch.setattr(Copies, "add", lambda self, tensor: added.append(tensor))
    EventBus().publish(batch(loss=far(0.5)))
    assert added == []


def test_G9_a_value_changed_after_publish_is_seen_as_it_was(gpu: Gpu) -> None:
    """The copy is queued on the stream before the next step changes the tensor."""
    gpu.arrived.set()
    bus = EventBus()
    got = collecting(bus)
    loss = far(0.5)
    bus.publish(batch(loss=loss))
    loss.as_subclass(torch.Tensor).fill_(9.0)
    assert bus.flush(5)
    bus.close()
    assert got[0].metrics == {"loss": 0.5}


def test_G9_pinned_slots_are_used_again(gpu: Gpu) -> None:
    """Thousands of numbers need no more host memory than are on their way at once."""
    gpu.arrived.set()
    slots = Slots()
    first = None
    for _ in range(5000):
        copies = Copies(slots)
        deferred = copies.add(far(1.0))
        copies.record()
        assert deferred.value() == 1.0
        first = first or len(slots._free)
    assert len(slots._free) == first


def test_G9_a_gpu_that_hangs_does_not_hold_the_log_for_ever(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while its numbers are given up and read as NaN."""
    monkeypatch.setattr("eventbus.log._DEVICE_WAIT_S", 0.05)
    bus = EventBus()
    got = collecting(bus)
    bus.publish(batch(loss=far(0.5)))
    until(lambda: got)
    assert got[0].metrics["loss"] != got[0].metrics["loss"]
    bus.close()


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_G9_on_a_real_gpu_publishing_synchronises_nothing() -> None:
    """Torch itself raises on any synchronisation while the events are published."""
    bus = EventBus()
    got = collecting(bus)
    bus.subscribe(lambda event: event.metrics["host"], name="inline")
    weights = torch.randn(512, 512, device="cuda")
    bus.publish(batch(loss=weights.sum(), host=1.0))  # the first use allocates the pinned slots
    assert bus.flush(10)
    expected = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in range(50):
            loss = (weights @ weights).mean() * 0 + n
            bus.publish(batch(loss=loss, host=float(n)))
            loss.add_(1000)  # in place, right behind the copy
            expected.append(float(n))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bus.flush(10)
    bus.close()
    assert [event.metrics["loss"] for event in got[1:]] == expected


@needs_cuda
def test_G9_on_a_real_gpu_an_inline_hook_pays_for_what_it_reads() -> None:
    bus = EventBus()
    seen = []
    bus.subscribe(lambda event: seen.append(event.metrics["loss"]))
    bus.publish(batch(loss=torch.tensor(0.5, device="cuda")))
    assert seen == [0.5]
