"""Writing the trained model for use elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eventbus.events import ExportEnd, ExportStart
from trainer.devices import evaluating, unwrapped

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["FORMATS", "export"]


def export(trainer: Trainer, format: str, path: Path, example: tuple[Any, ...] | None) -> Path:
    """Write the model in a format of `FORMATS`; an export that fails raises, and no `on_export_end` follows."""
    write = FORMATS.get(format)
    if write is None:
        raise ValueError(f"The format {format!r} is not known; there are: {', '.join(sorted(FORMATS))}.")
    run, started = trainer.progress, monotonic()
    run.publish(ExportStart, format=format, path=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    model = unwrapped(trainer.model)
    with evaluating(model):
        write(model, path, example)
    run.publish(ExportEnd, format=format, path=str(path), bytes=path.stat().st_size, seconds=monotonic() - started)
    return path


def _weights(model: nn.Module, path: Path, example: tuple[Any, ...] | None) -> None:
    torch.save(model.state_dict(), path)


def _program(model: nn.Module, path: Path, example: tuple[Any, ...] | None) -> None:
    torch.export.save(torch.export.export(model, _needed(example, "pt2")), path)


def _onnx(model: nn.Module, path: Path, example: tuple[Any, ...] | None) -> None:
    torch.onnx.export(model, _needed(example, "onnx"), str(path))


def _needed(example: tuple[Any, ...] | None, format: str) -> tuple[Any, ...]:
    if example is None:
        raise ValueError(f"The format {format!r} traces the model: give example=(input,), the arguments of one call.")
    return example


#: How each format is written: the state dict, a `torch.export` program, ONNX (which needs the package onnxscript).
FORMATS: dict[str, Callable[[nn.Module, Path, tuple[Any, ...] | None], None]] = {
    "onnx": _onnx,
    "pt2": _program,
    "weights": _weights,
}
