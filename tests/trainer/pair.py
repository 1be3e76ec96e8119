"""Two processes of one run, kept for many scenarios: importing torch is what takes long, a process group is not."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

#: What a scenario may take; one that hangs is a failure, and costs the pair.
LIMIT_S = 60.0


class Pair:
    """Runs a function of a test module in two processes at once, as ranks 0 and 1 of a new gloo group each time.

    The function is called as ``scenario(rank, *arguments)`` and returns what pickles.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._stores = 0

    def run(self, scenario: Callable[..., Any], directory: Path, *arguments: Any) -> tuple[Any, Any]:
        """What the scenario returned on each rank; raises `AssertionError` with the traceback where it failed."""
        if not self._members:
            self._members = [_Member.start(rank) for rank in range(2)]
        self._stores += 1
        for member in self._members:
            member.pipe.send((scenario, str(directory / f"store-{self._stores}"), arguments))
        answers = [self._answer(member) for member in self._members]
        if not all(is_alive for is_alive, *_ in answers):
            self.close(gracefully=False)
        failures = [f"rank {rank}:\n{text}" for rank, (_, is_done, text) in enumerate(answers) if not is_done]
        assert not failures, "\n".join(failures)
        return answers[0][2], answers[1][2]

    def _answer(self, member: _Member) -> tuple[bool, bool, Any]:
        """Whether the process is there, whether the scenario went to its end, and what came of it."""
        try:
            if member.pipe.poll(LIMIT_S):
                return True, *member.pipe.recv()
            return False, False, f"no answer within {LIMIT_S} s"
        except EOFError:
            return False, False, "the process has ended"

    def close(self, *, gracefully: bool = True) -> list[int | None]:
        """End both processes, and give their exit codes; a later `run` starts others."""
        members, self._members = self._members, []
        return [member.end(gracefully=gracefully) for member in members]


@dataclass
class _Member:
    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(cls, rank: int) -> _Member:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def end(self, *, gracefully: bool) -> int | None:
        if not gracefully:
            self.process.kill()
        self.pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        self.process.close()
        return code


def _serve(rank: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            scenario, store, arguments = pipe.recv()
        except EOFError:
            return
        try:
            with grouped(rank, store):
                answer = True, scenario(rank, *arguments)
        except BaseException:  # the parent's test fails with it
            answer = False, traceback.format_exc()
        pipe.send(answer)


@contextmanager
def grouped(rank: int, store: str) -> Iterator[None]:
    """While it lasts, this process is one of two in a gloo group that meets at a file."""
    from torch import distributed

    meeting_point = distributed.FileStore(os.path.abspath(store), 2)
    limit = timedelta(seconds=LIMIT_S)
    distributed.init_process_group("gloo", store=meeting_point, rank=rank, world_size=2, timeout=limit)
    try:
        yield
    finally:
        distributed.destroy_process_group()
