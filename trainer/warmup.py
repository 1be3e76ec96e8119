"""Warm-up: learning rates that rise in a line to what is planned for them, whoever plans it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch

from eventbus.rates import rates_of

__all__ = ["Warmup"]


class Warmup:
    """Makes the first of `steps` updates with 1/`steps` of the planned rates, the second with 2/`steps`, and so on.

    A scheduler never sees the lowered rates: it goes on from the planned ones, and so may be any, also one that
    computes its rates from scratch, as `LambdaLR` and `OneCycleLR` do. A rate that somebody else sets meanwhile,
    through `control` or in a hook, is the rate of that moment, and rises on in proportion.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._optimizer = optimizer
        self.steps = steps
        #: Updates so far.
        self.done = 0
        self._planned: tuple[float, ...] = ()
        self._shown: tuple[float, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the rates are what is planned."""
        return self.done + 1 >= self.steps

    @property
    def _factor(self) -> float:
        return min(1.0, (self.done + 1) / self.steps)

    def begin(self, step: int) -> None:
        """Lower the rates, unless a former training, or the one that is resumed, has; `step` updates were made."""
        if not self._shown:
            self.done = step
            self._planned = rates_of(self._optimizer)
            self._show()

    def step(self) -> bool:
        """Raise the rates after an update; True for the last time."""
        if self.is_over:
            return False
        self._look()
        self.done += 1
        self._show()
        return self.is_over

    @contextmanager
    def planning(self) -> Iterator[None]:
        """While it lasts the rates are the planned ones, for a scheduler to go on from."""
        if self.is_over:
            yield
            return
        self._look()
        self._set(self._planned)
        yield
        self._planned = rates_of(self._optimizer)
        self._show()

    def _look(self) -> None:
        """Take over what somebody else has set; a group that was added has the rate that is planned for it."""
        known = zip_longest(rates_of(self._optimizer), self._shown, self._planned)
        self._planned = tuple(
            now if shown is None else planned if now == shown else now / self._factor for now, shown, planned in known
        )

    def _show(self) -> None:
        self._set([rate * self._factor for rate in self._planned])
        self._shown = rates_of(self._optimizer)

    def _set(self, rates: Any) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # which a captured graph reads: it must stay the same one
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on warming up."""
        return {"done": self.done, "planned": list(self._planned), "shown": list(self._shown)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an earlier attempt was; the rates themselves are the optimizer's."""
        self.done = state["done"]
        self._planned, self._shown = tuple(state["planned"]), tuple(state["shown"])
