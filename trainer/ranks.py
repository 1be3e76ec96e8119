"""The processes of a distributed run, and what they tell each other.

Everything here is called by all of them, between two batches or at the end of an epoch, and never after an error:
a process that failed leaves (`trainer.departure`). It goes over CPU tensors, so that no GPU is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from trainer.departure import Connection, Departure, connections, store_of_group

__all__ = ["Ranks"]

_T = TypeVar("_T")


class Ranks:
    """This process among those of `torch.distributed`, or alone when that is not initialised.

    One that travels to another process finds its place there anew.
    """

    def __init__(self) -> None:
        self._world = _world()
        self.rank = 0 if self._world is None else distributed.get_rank()
        self.world_size = 1 if self._world is None else distributed.get_world_size()
        self._own_group: Any = None
        self._own_connections: frozenset[Connection] | None = None
        self._departure: Departure | None = None
        self._has_left = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()

    @property
    def is_current(self) -> bool:
        """Whether the process group is still the one that was found at the beginning."""
        return self._world is _world()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process to agree with."""
        return self.world_size == 1

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in at least one process."""
        if self.is_alone:
            return flag
        self._check_has_not_left()
        flags = torch.tensor([flag], dtype=torch.int32)
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(flags.item())

    def gather(self, value: _T) -> list[_T]:
        """The values of all processes, by rank; each must pickle."""
        if self.is_alone:
            return [value]
        self._check_has_not_left()
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def send_from_first(self, values: Iterable[Any]) -> None:
        """Overwrite the tensors among these values, on whatever device they are, with those of rank 0."""
        if not self.is_alone:
            for value in values:
                if isinstance(value, torch.Tensor):
                    distributed.broadcast(value, 0)

    def check_same(self, what: str, value: object, advice: str) -> None:
        """Raise `ValueError`, in all processes, unless the value is the same in all of them."""
        values = self.gather(value)
        if any(other != values[0] for other in values):
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"The processes differ in {what} ({shown}). {advice}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """While it lasts, an error that leaves it in one process ends all of them; within another one it does nothing.

        Where that came of another's error, raises `RankFailedError`, naming it.
        """
        if self.is_alone or self._departure is not None:
            yield
            return
        self._departure = self._agree_on_departure()
        try:
            with self.leaving():
                yield
        finally:
            self._departure, self._has_left = None, False

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Leave the others at an error already here, further inside: before hooks are told, and anything waits."""
        try:
            yield
        except BaseException as error:
            if self._departure is None or self._has_left:
                raise
            self._has_left = True
            reason = self._departure.leave(error)
            if reason is not None:
                raise reason from error
            raise

    def _check_has_not_left(self) -> None:
        if self._has_left:
            raise RuntimeError(
                "This process has left the others, since its run failed: nobody would answer. Ask for nothing that "
                "takes all of them in on_exception and the hooks after it; trainer.save_model does not."
            )

    def _agree_on_departure(self) -> Departure:
        meeting = self.gather(os.urandom(6).hex())[0]
        own = self._own_connections
        if own is None:
            own = self._shared(connections())
        return Departure(self.rank, self.world_size, meeting, own, store_of_group())

    def _shared(self, own: frozenset[Connection]) -> frozenset[Connection]:
        """Those of this process's connections that lead to another process of the run."""
        others = [theirs for rank, theirs in enumerate(self.gather(own)) if rank != self.rank]
        return frozenset((here, there) for here, there in own if any((there, here) in theirs for theirs in others))

    @property
    def _group(self) -> Any:
        """A gloo group of all processes: the default one, else one of our own, made with the first thing they tell."""
        if self._own_group is None and distributed.get_backend() != "gloo":
            before = connections()  # those made meanwhile are the group's: thousands of ranks need not compare theirs
            self._own_group = distributed.new_group(backend="gloo")
            self._own_connections = connections() - before
        return self._own_group


def _world() -> Any:
    return distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
