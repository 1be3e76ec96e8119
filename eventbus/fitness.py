"""The numbers of an epoch: their names, their means, and the one that says whether the epoch was good.

Values may be Python numbers or one-element tensors of any library; those on a GPU are only added up here, on the
GPU, and read once per epoch.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Fitness", "Means", "Mode", "Sums", "number", "qualified", "unknown_monitor"]

Mode = Literal["auto", "min", "max"]
#: For each metric, the weighted sum of its values and the sum of the weights.
Sums = dict[str, tuple[float, float]]

_BY_DEFAULT = ("fitness", "val/fitness", "val/loss", "train/loss")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|(?:^|[/_-])(?:err|mae|mse|rmse|ppl|nll|wer|cer|fid)(?:$|[/_-])")


def qualified(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """``loss`` as ``train/loss``; keys that have a ``/`` stay."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}


def number(value: Any) -> Any:
    """A value as a float where that is free, as a detached tensor where reading it would wait for a GPU.

    Raises `TypeError` for what is neither a number nor a one-element tensor or array.
    """
    if isinstance(value, int | float):
        return float(value)
    if math.prod(getattr(value, "shape", (0,))) != 1:
        raise TypeError(f"{_what(value)} is no number; give a number or a one-element tensor.")
    if not is_on_host(value):
        return value.detach().reshape(())
    return float(value.item() if hasattr(value, "item") else value)


def is_on_host(value: Any) -> bool:
    """Whether reading a tensor or array waits for no device."""
    is_cpu = getattr(value, "is_cpu", None)  # torch's: quicker than asking its device
    return is_cpu if isinstance(is_cpu, bool) else getattr(getattr(value, "device", None), "type", "cpu") == "cpu"


def _what(value: object) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"A {kind} of shape {tuple(shape)}" if shape is not None else f"A {kind}"


class Means:
    """Weighted means of metrics; a metric that some batches lack is averaged over those that have it."""

    __slots__ = ("_sums",)

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        #: Of `sums`, to go on from them.
        self._sums: dict[str, list[Any]] = {name: list(sum_) for name, sum_ in (sums or {}).items()}

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add a batch; `weight` is its number of samples."""
        for name, value in metrics.items():
            held = self._sums.setdefault(name, [0.0, 0.0])
            # a new tensor each time: what was handed out before must not change
            held[0] = held[0] + (value if isinstance(value, float) else value.float()) * weight
            held[1] += weight

    def running(self) -> dict[str, Any]:
        """The means so far; a metric on a GPU stays there, so this never waits."""
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}

    def sums(self) -> Sums:
        """Everything as Python numbers: a device synchronisation where metrics are on a GPU, once for the same sums."""
        for held in self._sums.values():
            held[0] = float(held[0])
        return {name: (total, weight) for name, (total, weight) in self._sums.items()}

    def means(self, merge: Callable[[Sums], Sums] = lambda sums: sums) -> dict[str, float]:
        """The means as Python numbers; `merge` may add what other processes have."""
        return {name: total / weight for name, (total, weight) in merge(self.sums()).items() if weight}


def names_for(monitor: str) -> tuple[str, ...]:
    """What `monitor` may mean, best first: itself, ``val_loss`` as ``val/loss``, ``loss`` of either part."""
    return monitor, monitor.replace("_", "/", 1), f"val/{monitor}", f"train/{monitor}"


class Fitness:
    """How good an epoch is: higher is better, and NaN is never best.

    It is the monitored metric (negated for mode "min"), else ``metrics["fitness"]``, else minus ``val/loss``, else
    minus ``train/loss``. Mode "auto" takes "min" for names that speak of a loss or an error.
    """

    def __init__(self, monitor: str | None = None, mode: Mode = "auto") -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode={mode!r} is not known; it is 'auto', 'min' or 'max'.")
        self.monitor = monitor
        self.mode: Mode = mode
        #: The metric it was taken from, once there was one.
        self.source: str | None = None
        #: This epoch's; None when the epoch lacks the metric (for example because it was not validated).
        self.current: float | None = None
        self.best: float | None = None
        self.previous_best: float | None = None

    @property
    def is_best(self) -> bool:
        """Whether the epoch judged last is the best so far."""
        return self.current is not None and self.current == self.best and self.best != self.previous_best

    def judge(self, metrics: Mapping[str, float], *, validated: bool) -> None:
        """Take the fitness of an epoch; `validated` says whether `metrics` are complete.

        Raises `ValueError` naming the nearest metric when they are and never had the monitored one.
        """
        self.previous_best = self.best
        source = self._source(metrics, validated=validated)
        # as a float, since a numpy scalar in a checkpoint could not be read again
        current = self.current = None if source is None else self._signed(source, float(metrics[source]))
        if current is not None and not math.isnan(current) and (self.best is None or current > self.best):
            self.best = current

    def _source(self, metrics: Mapping[str, float], *, validated: bool) -> str | None:
        names = self.names
        source = next((name for name in names if name in metrics), None)
        if source is None:
            if self.source is None and self.monitor is not None and validated:
                raise ValueError(unknown_monitor(self.monitor, metrics))
            return None
        if self.source is not None and names.index(source) > names.index(self.source):
            return None  # an epoch that was not validated is not compared with those that were
        if source != self.source:
            self.source = source
            self.best = self.previous_best = None  # of another metric
        return source

    def _signed(self, source: str, value: float) -> float:
        return 0.0 - value if self.lower_is_better(source) else value  # no -0.0

    def lower_is_better(self, metric: str) -> bool:
        """Whether it is negated; `mode` is about the monitored metric, the others are known."""
        if self.mode == "auto" or self.monitor is None:
            return _LOWER_IS_BETTER.search(metric.lower()) is not None
        return self.mode == "min"

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The monitored value itself, as people know it."""
        return metrics.get(self.source) if self.source is not None else None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on comparing."""
        return {"source": self.source, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the best of an earlier attempt, unless it is of a metric that is no longer monitored."""
        if state["source"] in self.names:
            self.source, self.best = state["source"], state["best"]

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics it is taken from, the first that there is."""
        return names_for(self.monitor) if self.monitor is not None else _BY_DEFAULT


def unknown_monitor(monitor: str, metrics: Mapping[str, float]) -> str:
    """Say that no metric has this name, with the nearest one that exists."""
    near = difflib.get_close_matches(monitor, metrics, n=1, cutoff=0.0)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"monitor={monitor!r} is no metric of this run.{hint} It has: {', '.join(sorted(metrics)) or 'none'}."
