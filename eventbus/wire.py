"""What a process subscriber and its child say to each other: framed msgpack, with no pickle in what comes back."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from eventbus.errors import ChildError, SinkGone, SinkUnavailable
from eventbus.main_script import MainScript
from eventbus.stats import Outcome

__all__ = [
    "Alive", "Begun", "Broken", "Bye", "End", "EventClass", "Frames", "FromChild", "Hurry", "LateOk",
    "Ready", "Recovered", "Retried", "Sent", "Settled", "Start", "ToChild", "Told", "Trouble", "frame", "from_child",
    "to_child",
]  # fmt: skip

_HEAD = 4
_LONGEST_TRACE = 60_000


class _Message(msgspec.Struct, array_like=True, tag=True):
    """One frame."""


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels: in words, since an exception of the child may be of a class that is unknown here."""

    kind: Literal["error", "timeout", "unavailable", "gone"]
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        try:
            said = str(error)
        except Exception:  # noqa: BLE001  # a broken __str__ hides nothing but itself
            said = ""
        if isinstance(error, SinkUnavailable | SinkGone):
            return cls("unavailable" if isinstance(error, SinkUnavailable) else "gone", said, "")
        if isinstance(error, TimeoutError) and error.__traceback__ is None:
            return cls("timeout", said, "")
        name = type(error).__name__
        trace = "".join(traceback.format_exception(error)) if error.__traceback__ is not None else ""
        return cls("error", f"{name}: {said}" if said else name, trace[-_LONGEST_TRACE:])

    def error(self) -> BaseException:
        if self.kind == "unavailable":
            return SinkUnavailable(self.text)
        if self.kind == "gone":
            return SinkGone(self.text)
        if self.kind == "timeout":
            return TimeoutError(self.text)
        error = ChildError(self.text)
        if self.trace:
            error.add_note(f"in its process:\n{self.trace.rstrip()}")
        return error


# ------------------------------------------------------------------------------------------------- to the child


class Start(_Message):
    """The first frame: whom the child serves, and as what."""

    target: bytes
    serve_as: Literal["def", "async", "sink"]
    name: str
    run: str
    rank: int
    wanted_rank: int | Literal["all"] | None
    timeout_s: float
    retries: int
    #: How often the first event may still be tried again; the former child has used up some of it.
    first_retries: int
    argv: list[str]
    main: MainScript | None


class EventClass(_Message):
    """Where an event class is defined that is none of the vocabulary; before the first event of it."""

    module: str
    qualname: str


class Sent(_Message):
    """One event."""

    seq: int
    size: int
    event: bytes


class Hurry(_Message):
    """Somebody waits for what was sent so far: a sink gathers no longer."""


class End(_Message):
    """Nothing more comes. Serve what was sent, or drop it, or leave it to whoever serves next; then end."""

    how: Literal["ended", "unsubscribed", "moved"]


# ----------------------------------------------------------------------------------------------- from the child


class Ready(_Message):
    """The target is imported."""


class Begun(_Message):
    """Of the events sent and not settled, so many are now being handled."""

    count: int


class Settled(_Message):
    """So many of the events sent, from the oldest, are over and done with."""

    count: int
    outcome: Outcome | Literal["dropped"]
    seconds: float
    reason: str
    trouble: Trouble | None


class Retried(_Message):
    """The oldest event is tried again after a pause."""


class LateOk(_Message):
    """So many events that had timed out were delivered after all."""

    count: int


class Told(_Message):
    """Something went wrong that settles no event: a sink cannot open, or its receiver is away."""

    trouble: Trouble


class Recovered(_Message):
    """What it told is over: its sink is open."""


class Broken(_Message):
    """The target cannot be imported here."""

    trouble: Trouble


class Alive(_Message):
    """The child's loop turns."""


class Bye(_Message):
    """The last event is settled and the sink is closed."""


ToChild: TypeAlias = Start | EventClass | Sent | Hurry | End
FromChild: TypeAlias = Ready | Recovered | Begun | Settled | Retried | LateOk | Told | Broken | Alive | Bye

to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def frame(message: ToChild | FromChild) -> bytes:
    """The bytes of one message: how many follow, and the message."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_HEAD) + data


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Add what has arrived; the messages that are complete now."""
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) >= (begin := start + _HEAD):
            end = begin + int.from_bytes(buffer[start:begin])
            if len(buffer) < end:
                break
            yield bytes(buffer[begin:end])
            start = end
        del buffer[:start]
