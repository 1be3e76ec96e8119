"""Numbers that are still on a GPU: copied without waiting at publish, read on the bus side when they have arrived.

`Tensor.item()` on a CUDA tensor makes the host wait for everything queued on the stream, which ends the run-ahead
that hides the launch cost of the next step. So `publish` only queues a copy into pinned host memory and records a
CUDA event; the bus side polls that event and never synchronises. Torch is never imported here: a tensor can only
exist once somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

__all__ = ["Copies", "Deferred", "Slots"]

_SLOTS_PER_BLOCK = 1024


class Slots:
    """Pinned host numbers of 8 bytes, allocated in blocks and used again: allocating one each time would block."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: deque[Any] = deque()

    def take(self) -> Any:
        try:
            return self._free.popleft()
        except IndexError:
            torch = sys.modules["torch"]
            block = torch.empty(_SLOTS_PER_BLOCK, dtype=torch.float64, pin_memory=True)
            self._free.extend(block.unbind())
            return self._free.popleft()

    def give_back(self, slot: Any) -> None:
        self._free.append(slot)


class Deferred:
    """One number on its way from a GPU."""

    __slots__ = ("_copies", "_number", "_slot", "_slots", "_type")

    def __init__(self, tensor: Any, slots: Slots, copies: Copies) -> None:
        self._type = float if tensor.is_floating_point() else bool if tensor.dtype is _torch().bool else int
        self._slots = slots
        self._slot = slots.take()
        self._slot.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._copies = copies
        self._number: float | int | bool = 0

    def value(self) -> float | int | bool:
        """The number; waits for its copy when it has not arrived (which only an inline hook ever does)."""
        slot = self._slot
        if slot is None:
            return self._number
        if not self._copies.arrived() and (self._copies.lost or not self._copies.wait()):
            return float("nan")
        number: float | int | bool = self._type(slot.item())
        if self._slot is slot:  # a hook and the bus side may both be here: no call comes between this and the store
            self._number = number
            self._slot = None
            self._slots.give_back(slot)
        return self._number

    def known(self) -> float | int | bool:
        """The number if it was read already, else NaN; never waits."""
        return self._number if self._slot is None else float("nan")

    def __repr__(self) -> str:
        return repr(self.value())


class Copies:
    """The device copies of one publish."""

    __slots__ = ("_devices", "_events", "_failed", "_slots", "lost")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._devices: dict[Any, None] = {}
        self._events: list[Any] = []
        self._failed = False
        #: The GPU hangs, or fails: the numbers are given up and read as NaN.
        self.lost = False

    def __bool__(self) -> bool:
        return bool(self._devices)

    def add(self, tensor: Any) -> Deferred:
        """Queue the copy of a one-element CUDA tensor on its device's current stream, behind the work that makes it."""
        self._devices[tensor.device] = None
        return Deferred(tensor, self._slots, self)

    def record(self) -> None:
        """Mark the end of the copies on each stream; called once, after the last `add`."""
        cuda = _torch().cuda
        try:
            for device in self._devices:
                event = cuda.Event()
                event.record(cuda.current_stream(device))
                self._events.append(event)
        except Exception:  # noqa: BLE001  # an error of the GPU, which the training will meet where it belongs
            self.lost = self._failed = True

    def arrived(self) -> bool:
        """Whether every copy is in host memory; asks, never waits. After an error of the GPU none ever is."""
        try:
            return not self._failed and all(event.query() for event in self._events)
        except Exception:  # noqa: BLE001  # as in `record`
            self.lost = self._failed = True
            return False

    def wait(self) -> bool:
        """Wait for them: a host-device synchronisation, paid by whoever reads a key inline. False after an error."""
        try:
            for event in self._events:
                event.synchronize()
        except Exception:  # noqa: BLE001  # as in `record`
            self.lost = self._failed = True
        return not self._failed


def _torch() -> Any:
    return sys.modules["torch"]
