"""The learning rates of an optimizer, which is anything with ``param_groups``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Optimizer", "Refused", "rates_of", "set_rates", "wanted_rates"]


class Optimizer(Protocol):
    """What is needed of an optimizer: one dict per parameter group, with its ``lr``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One dict per group of parameters."""
        ...


class Refused(Exception):  # noqa: N818  # an answer, not an error
    """Why a request is answered with ``accepted=False``."""


def rates_of(optimizer: Optimizer | None) -> tuple[float, ...]:
    """One value per parameter group; empty without an optimizer."""
    return () if optimizer is None else tuple([float(group["lr"]) for group in optimizer.param_groups])


def wanted_rates(current: Sequence[float], arguments: Mapping[str, Any]) -> tuple[float, ...]:
    """The rates that a "set_lr" asks for; raises `Refused` for what cannot be one."""
    if "scale" in arguments:
        factor = _rate(arguments["scale"], "scale")
        return tuple(rate * factor for rate in current)
    value = arguments["value"]
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        return (_rate(value, "a learning rate"),) * len(current)
    rates = tuple(_rate(item, "a learning rate") for item in value)
    if len(rates) != len(current):
        raise Refused(f"{len(rates)} learning rates for {len(current)} parameter groups")
    return rates


def _rate(value: Any, what: str) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        raise Refused(f"{what} must be a number, not {value!r}") from None
    if not math.isfinite(rate) or rate < 0:
        raise Refused(f"{what} must be finite and not negative, not {rate}")
    return rate


def set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Set one rate per group, and scale with it what schedulers keep in the group, so that they go on from there."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        old = float(group["lr"])
        for key in ("initial_lr", "max_lr", "min_lr"):
            if key in group:
                group[key] = group[key] * rate / old if old else rate
        if hasattr(group["lr"], "fill_"):  # a tensor, which a captured graph reads: it must stay the same one
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
