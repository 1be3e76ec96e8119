"""Where the model is, and how a batch gets there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["choose_device", "compiled", "evaluating", "move", "unwrapped"]


def choose_device(device: str | torch.device) -> torch.device:
    """The device that is named; "auto" is this process's GPU (``LOCAL_RANK``), else Apple's, else the CPU."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device; copies from pinned memory do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)([move(value, device) for value in batch])
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else _like(batch, moved)
    return batch.to(device) if hasattr(batch, "to") else batch


def _like(batch: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of the same type, where that is made from a mapping; else the dict."""
    try:
        return type(batch)(moved)
    except TypeError:
        return moved


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; afterwards each module is again in the mode it was in, frozen ones too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])  # a module may do more than set its mode
        for module, mode in modes:
            module.training = mode


def compiled(model: nn.Module) -> nn.Module:
    """The model, compiled when it is first called; its weights and their names stay the same."""
    module: nn.Module = torch.compile(model)  # type: ignore[assignment]  # a module, since it was given one
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of `DistributedDataParallel` or `torch.compile`, so that its weights load anywhere."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
