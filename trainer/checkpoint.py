"""Checkpoints on disk: each file is complete or is not there, and one that cannot be written stops nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from eventbus.fitness import Fitness, Mode
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["ModelCheckpoint", "Saved", "save_file"]

_log = logging.getLogger("trainbus")


@dataclass(frozen=True)
class Saved:
    """What came of writing one file: its size, or why it could not be written."""

    path: Path
    fitness: Fitness
    is_best: bool = False
    size_bytes: int | None = None
    error: str = ""


class ModelCheckpoint(Callback):
    """Keep ``last.pt``, and ``best.pt`` of the epoch with the best fitness (or the best `monitor`, with `mode`).

    The trainer has one of its own unless it is given another or ``save_dir=None``. It calls `save` after every
    hook of the epoch has run, so that the state of all callbacks is in the file as they left it.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, monitor: str | None = None, mode: Mode = "auto"
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._fitness = Fitness(monitor, mode) if monitor is not None else None

    def directory_in(self, save_dir: Path | None) -> Path:
        """Where it writes: its own directory, else the trainer's `save_dir`."""
        directory = self._directory or save_dir
        if directory is None:
            raise ValueError("ModelCheckpoint needs a directory, since the trainer has save_dir=None.")
        return directory

    def on_pretrain_routine_start(self, trainer: Trainer) -> None:
        """Remove what a killed process left half written."""
        if trainer.rank == 0:
            directory = self.directory_in(trainer.save_dir)
            for left in (*directory.glob(".last.pt.*.tmp"), *directory.glob(".best.pt.*.tmp")):
                with contextlib.suppress(OSError):
                    left.unlink()

    def best_of(self, trainer: Trainer) -> Path | None:
        """``best.pt``, when this run, or the attempt that it goes on from, has had an epoch that was the best."""
        fitness = self._fitness or trainer.progress.fitness
        path = self.directory_in(trainer.save_dir) / "best.pt"
        return path if fitness.best is not None and path.exists() else None

    def on_fit_epoch_end(self, trainer: Trainer) -> None:
        """Judge the epoch by the metric of its own."""
        if self._fitness is not None and trainer.progress.is_whole:
            self._fitness.judge(trainer.metrics, validated=trainer.progress.is_validated)

    def save(
        self, trainer: Trainer, state: Callable[[], Mapping[str, Any]], *, is_due: bool, is_judged: bool
    ) -> list[Saved]:
        """Write ``last.pt`` when it is due, and ``best.pt`` when the model was just judged and is the best."""
        fitness = self._fitness or trainer.progress.fitness
        last, best = (self.directory_in(trainer.save_dir) / name for name in ("last.pt", "best.pt"))
        written: list[Saved] = []
        # The best first: a process killed in between goes on from the older last.pt, and comes by this best again.
        if is_judged and fitness.is_best:
            written.append(save_file(best, state, fitness, is_best=True))
        if is_due:
            copy_of = best if written and not written[0].error else None
            written.insert(0, save_file(last, state, fitness, copy_of=copy_of))
        return written

    def state_dict(self) -> Mapping[str, Any]:
        """The best of the metric of its own."""
        return {} if self._fitness is None else self._fitness.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on comparing with the best of an earlier attempt."""
        if self._fitness is not None:
            self._fitness.load_state_dict(state)


def save_file(
    path: Path,
    state: Callable[[], Mapping[str, Any]],
    fitness: Fitness,
    *,
    is_best: bool = False,
    copy_of: Path | None = None,
) -> Saved:
    """Write a checkpoint, or make it a copy of one just written. Never raises an `Exception`: it is in the result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if copy_of is not None:
            size_bytes = _replace(path, lambda temporary: _link(copy_of, temporary))
        else:
            size_bytes = _replace(path, lambda temporary: _write(temporary, state()))
    except Exception as error:  # noqa: BLE001  # a full disk, a lost mount, an object that does not pickle: the training goes on
        reason = f"{type(error).__name__}: {error}"
        _log.error("The checkpoint %s could not be written; the training goes on. %s", path, reason)
        return Saved(path, fitness, is_best, error=reason)
    return Saved(path, fitness, is_best, size_bytes)


def _replace(path: Path, write: Callable[[Path], None]) -> int:
    """Write beside `path`, then take its place in one step, so that the older file is whole until then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        size_bytes = temporary.stat().st_size
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)
    return size_bytes


def _write(path: Path, state: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        _sync(file)
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # maps the tensors and reads none of them
    except pickle.UnpicklingError as error:
        raise TypeError(_unreadable(state)) from error


def _unreadable(state: Mapping[str, Any]) -> str:
    """Name what in a checkpoint cannot be read again without running code."""
    parts = {name: part for name, part in state.items() if name != "callbacks"}
    parts |= {f"callback {name}": part for name, part in state.get("callbacks", {}).items()}
    wrong = [name for name, part in parts.items() if not _is_readable(part)]
    return f"the state of {', '.join(wrong)} could not be read again: keep it to tensors, numbers, str, list and dict"


def _is_readable(part: Any) -> bool:
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    """Give the same bytes a second name; they never change, since every write makes a new file."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        with source.open("rb") as original, target.open("wb") as copy:
            shutil.copyfileobj(original, copy)
            _sync(copy)


def _sync(file: BinaryIO | Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Make the new name survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
