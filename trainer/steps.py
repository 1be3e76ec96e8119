"""The parts of a training step that a subclass of the trainer may replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from eventbus.fitness import number

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Precision", "Steps"]

Precision = Literal["fp32", "bf16", "fp16"]
_LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Steps:
    """What happens with one batch; each method may be overridden."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    accumulate: int
    clip_norm: float | None
    device: torch.device
    precision: Precision

    def training_step(self, batch: Any) -> torch.Tensor | Mapping[str, Any] | None:
        """The loss of a batch, a scalar or a mapping with "loss" and metrics; None to skip the batch."""
        result: torch.Tensor | Mapping[str, Any] | None = self.loss_fn(self.model, batch)
        return result

    def validation_step(self, batch: Any) -> torch.Tensor | Mapping[str, Any]:
        """Like `training_step`; what it returns is also kept for `validation_end` where that is overridden.

        Values with one number per sample are told by `on_val_image_end`.
        """
        result: torch.Tensor | Mapping[str, Any] = self.loss_fn(self.model, batch)
        return result

    def validation_end(self, outputs: Sequence[Any]) -> Mapping[str, Any]:
        """Metrics of the whole loader that cannot be averaged over batches, from what each step returned.

        In a distributed run each process sees its own batches, and the mean of their numbers, weighted by samples, is
        told. For what is no such mean either, gather the outputs in here: every process that had batches comes here.
        """
        return {}

    def prediction_step(self, batch: Any) -> Any:
        """The outputs for a batch: by default of the model, called with the batch or with its first item."""
        return self.model(batch[0] if isinstance(batch, list | tuple) else batch)

    def casting(self) -> AbstractContextManager[object]:
        """Around each step: computes in the lower precision where that is safe (`torch.autocast`)."""
        dtype = _LOWER.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients; `loss` is already divided by `accumulate`."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        torch.autograd.backward(scaled)

    def optimizer_step(self) -> bool:
        """Update the parameters; False when the scaler skipped the update, since gradients were not finite."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def finish_gradients(self, batches: int, *, wants_norm: bool) -> torch.Tensor | None:
        """Make the gradients of `batches` batches final: unscaled, their mean, clipped; the norm is before clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        is_full = batches == self.accumulate  # else the losses were divided by the size of a full group
        if is_full and self.clip_norm is None and not wants_norm:
            return None
        gradients = [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not is_full:
            for gradient in gradients:
                gradient.mul_(self.accumulate / batches)
        if not gradients or (self.clip_norm is None and not wants_norm):
            return None
        norm = _norm(gradients)
        if self.clip_norm is not None:
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        return norm

    @property
    def keeps_outputs(self) -> bool:
        """Whether anything wants what every validation step returned."""
        return type(self).validation_end is not Steps.validation_end

    def validation_numbers(self, outputs: Sequence[Any]) -> dict[str, float]:
        """What `validation_end` makes of the outputs, as floats."""
        if not self.keeps_outputs:
            return {}
        return {name: float(number(value)) for name, value in self.validation_end(outputs).items()}


def _norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, without waiting for it."""
    norms = [torch.linalg.vector_norm(gradient.detach()) for gradient in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
