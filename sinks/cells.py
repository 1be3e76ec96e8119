"""An event as the cells of one CSV row, by column, and what makes two rows the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["cells", "identity"]

_FIRST = ("time", "run", "rank", "attempt", "seq", "hook")
_UNNAMED = ("metrics", "values")  # their keys are columns as they stand
_LONGEST_CELL = 32_767  # what spreadsheets hold; Python's own reader stops at 131,072
_NON_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}

_PLACE = ("hook", "run", "rank", "epoch", "batch", "phase", "path", "step")
_ONCE_PER_EPOCH = {"on_train_epoch_start", "on_train_epoch_end", "on_val_start", "on_val_end", "on_fit_epoch_end"}
_ONCE_PER_ATTEMPT = {"on_checkpoint_load", "on_control", "on_exception", "on_train_end", "on_train_start"}


def cells(line: bytes) -> dict[str, str]:
    """Flatten an event in its JSON form: ``metrics`` to their own names, other nested keys joined by ``/``.

    A missing value is an empty cell; non-finite numbers are ``nan``, ``inf`` and ``-inf``.
    """
    record: dict[str, Any] = msgspec.json.decode(line)
    row = {name: _cell(record.get(name)) for name in _FIRST}
    for name, value in record.items():
        if name in _UNNAMED and isinstance(value, dict):
            taken = record.keys() - {name}
            for path, inner in _leaves(value):
                row[f"{name}/{path}" if path in taken or path in row else path] = _cell(inner)
        elif isinstance(value, (dict, list)):
            prefix = "lr/pg" if name == "lr" else f"{name}/"
            row.update((f"{prefix}{path}", _cell(inner)) for path, inner in _leaves(value))
        elif name not in row:
            row[name] = _cell(value)
    return row


def _leaves(value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, (dict, list)):
            yield from ((f"{key}/{path}", leaf) for path, leaf in _leaves(inner))
        else:
            yield str(key), inner


def _cell(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value)
    if len(value) > _LONGEST_CELL:
        return value[: _LONGEST_CELL - 1] + "…"
    return _NON_FINITE.get(value, value)


def identity(row: Mapping[str, str]) -> int:
    """Return a number that is the same for two rows about the same point of the same run.

    An epoch has one row per hook and rank even if its step differs; a batch or a step has its own; what has neither,
    and what happens once per attempt, is itself alone.
    """
    hook = row.get("hook", "")
    place = [row.get(name, "") for name in _PLACE]
    if hook in _ONCE_PER_EPOCH and row.get("epoch"):
        place.pop()
    elif hook in _ONCE_PER_ATTEMPT or not any(row.get(name) for name in ("epoch", "batch", "step")):
        place += [row.get("attempt", ""), row.get("seq", "")]
    return hash(tuple(place))
