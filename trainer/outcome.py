"""What a training or validation step returned: the loss, and the numbers to tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from eventbus.fitness import number

__all__ = ["Outcome", "read_step", "read_validation", "samples"]


class Outcome(NamedTuple):
    """The result of one training batch."""

    #: With its graph, to go backward from.
    loss: torch.Tensor
    #: Numbers, or detached tensors of one element where they are on a GPU.
    metrics: dict[str, Any]


def read_step(result: Any) -> Outcome:
    """Take apart what a training step returned; raises `TypeError` or `ValueError` saying what is wrong with it."""
    loss, others = (result.get("loss"), dict(result)) if isinstance(result, Mapping) else (result, {})
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            "The loss function or training_step must return a scalar tensor, or a mapping with one as 'loss'; "
            f"it returned {f'a mapping of {sorted(others)}' if others else f'a {type(result).__name__}'}."
        )
    metrics = {"loss": _loss(loss)}
    for name, value in others.items():
        try:
            metrics[name] = metrics["loss"] if name == "loss" else number(value)
        except TypeError as error:
            raise TypeError(f"The metric {name!r} cannot be told: {error}") from None
    return Outcome(loss if loss.ndim == 0 else loss.reshape(()), metrics)


def read_validation(result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a validation step returned: its metrics, and whatever has more than one element."""
    metrics: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for name, value in (result if isinstance(result, Mapping) else {"loss": result}).items():
        try:
            metrics[name] = _loss(value) if name == "loss" else number(value)
        except TypeError:
            if name == "loss":
                raise
            outputs[name] = value
    return metrics, outputs


def samples(outputs: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """What a validation step told about each sample: its share of every output with one number per sample."""
    per_sample = {name: value for name, value in outputs.items() if getattr(value, "shape", None) == (size,)}
    for index in range(size):
        yield {name: value[index] for name, value in per_sample.items()}


def _loss(loss: Any) -> Any:
    if isinstance(loss, torch.Tensor) and loss.ndim and loss.numel() != 1:
        raise ValueError(f"The loss must be one number; it has shape {tuple(loss.shape)}. Reduce it, as by .mean().")
    return number(loss)
