"""As much of torch as the bus touches, with a GPU whose work runs when the test says so, and a count of every wait.

Work is queued on one stream per device and done by `Device.run`; waiting for it (`Tensor.item` on a CUDA tensor,
`Event.synchronize`) does the work and is counted in `Device.waits`.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Device", "Tensor", "install"]


class Device:
    """A GPU, or the host memory when it has no queue."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._queued = self._done = 0
        #: How often somebody waited for it.
        self.waits = 0
        #: How many numbers were copied off it.
        self.copies = 0
        #: What happens when somebody waits; a test may forbid it.
        self.on_wait: Callable[[], None] = lambda: None

    def queue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._queued += 1

    def run(self) -> None:
        """Do all that is queued."""
        while self._queue:
            self._queue.popleft()()
            self._done += 1

    def wait(self) -> None:
        self.waits += 1
        self.on_wait()
        self.run()


class Tensor:
    """One number, or a vector of them."""

    is_meta = False
    #: Called when a number is read from host memory.
    on_read: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, value: Any, device: Device | None = None, dtype: str = "torch.float32") -> None:
        self.value = value
        self.device = device
        self.dtype = sys.intern(dtype)
        self.is_cuda = device is not None
        self.shape = (len(value),) if isinstance(value, list) else ()

    def numel(self) -> int:
        return len(self.value) if self.shape else 1

    def is_floating_point(self) -> bool:
        return "float" in self.dtype

    def detach(self) -> Tensor:
        return self

    def reshape(self, shape: tuple[()]) -> Tensor:
        return self

    def unbind(self) -> list[Tensor]:
        return [Tensor(value) for value in self.value]

    def item(self) -> Any:
        if self.device is not None:
            self.device.wait()
        else:
            Tensor.on_read()
        return self.value

    def set_(self, value: Any) -> None:
        """Change it in place, in the order of its stream."""
        assert self.device is not None
        self.device.queue(lambda: setattr(self, "value", value))

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        assert source.device is not None
        assert not self.is_cuda
        source.device.copies += 1
        source.device.queue(lambda: setattr(self, "value", float(source.value)))


class Event:
    """A mark in a stream."""

    def record(self, stream: Device) -> None:
        self._stream = stream
        self._position = stream._queued

    def query(self) -> bool:
        return self._stream._done >= self._position

    def synchronize(self) -> None:
        if not self.query():
            self._stream.wait()


class _Torch(types.ModuleType):
    """The module; counts the blocks of pinned memory."""

    Tensor = Tensor
    float64 = sys.intern("torch.float64")
    bool = sys.intern("torch.bool")

    def __init__(self) -> None:
        super().__init__("torch")
        self.blocks = 0
        self.cuda = types.SimpleNamespace(Event=Event, current_stream=lambda device: device)

    def empty(self, count: int, *, dtype: str, pin_memory: bool) -> Tensor:
        assert pin_memory, "a copy into pageable memory waits"
        self.blocks += 1
        return Tensor([0.0] * count, dtype=dtype)


def install(monkeypatch: Any) -> _Torch:
    """Put the fake in the place of torch, whether that is there or not."""
    torch = _Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch
