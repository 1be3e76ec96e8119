"""The settings of a training, as plain values: for `on_pretrain_routine_start` and for ``trainer.args``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from eventbus.lifecycle import Plan
    from trainer.trainer import Trainer

__all__ = ["one_of", "settings_of"]

_TAKEN: tuple[str, ...] = ("accumulate", "clip_norm", "log_every", "mode", "monitor", "on_nan", "on_oom")
_TAKEN += ("precision", "seed", "warmup")

_T = TypeVar("_T")


def one_of(name: str, value: _T, known: tuple[Any, ...]) -> _T:
    """The value of an option, when it is one of those that are known; raises `ValueError` otherwise."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; it is {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")
    return value


def settings_of(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Names and numbers only: nothing that holds a tensor or runs code."""
    return {name: getattr(trainer, name) for name in _TAKEN} | {
        "device": str(trainer.device),
        "ema": None if trainer.average is None else trainer.average.decay,
        "epochs": plan.epochs,
        "loss": getattr(trainer.loss_fn, "__qualname__", type(trainer.loss_fn).__qualname__),
        "lr": [float(group["lr"]) for group in trainer.optimizer.param_groups],
        "max_steps": plan.max_steps,
        "model": type(trainer.model).__qualname__,
        "name": trainer.run,
        "optimizer": type(trainer.optimizer).__qualname__,
        "save_dir": None if trainer.save_dir is None else str(trainer.save_dir),
        "scheduler": None if trainer.scheduler is None else type(trainer.scheduler).__qualname__,
    }
