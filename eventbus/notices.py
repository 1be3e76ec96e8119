"""What the bus says about itself in the log: each thing once, then once a minute with a count."""

from __future__ import annotations

import logging
from time import monotonic

from eventbus.redaction import hide_credentials

__all__ = ["Notices", "log", "logger", "reason"]

logger = logging.getLogger("eventbus")

_INTERVAL_S = 60.0
_LONGEST_REASON = 200


class Notices:
    """Rate-limited log records of one bus. Never called while a lock is held or a feeder runs: handlers are foreign."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def is_due(self, key: str) -> bool:
        """Whether the next record with this `key` would be logged."""
        said = self._said_s.get(key)
        return said is None or monotonic() - said >= _INTERVAL_S

    def say(
        self,
        level: int,
        key: str,
        message: str,
        *args: object,
        error: BaseException | None = None,
        once: bool = False,
        now: bool = False,
    ) -> int:
        """Log it unless the same `key` was logged within the last minute (or ever, with `once`); with `now`, log it.

        Returns how many times it has happened since the last record, this one included; 0 when nothing was logged.
        """
        at_s = monotonic()
        said = self._said_s.get(key)
        if said is not None and not now and (once or at_s - said < _INTERVAL_S):
            self._unsaid[key] = self._unsaid.get(key, 0) + 1
            return 0
        self._said_s[key] = at_s
        repeats = self._unsaid.pop(key, 0)
        if repeats:
            message += f" ({repeats} more times since the last report)"
        log(level, message, *args, error=error)
        return repeats + 1


def log(level: int, message: str, *args: object, error: BaseException | None = None) -> None:
    """Log it with the error's traceback, as text where that would show the credentials of a URL."""
    import traceback  # here: most processes never report a failure

    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    shown = hide_credentials(trace)
    if shown != trace:
        logger.log(level, message + "\n%s", *args, shown)
    else:
        logger.log(level, message, *args, exc_info=error)


def reason(error: BaseException) -> str:
    """An error in a few words, with the credentials of URLs hidden."""
    try:
        said = hide_credentials(str(error))
    except Exception:  # noqa: BLE001  # a broken __str__ hides nothing but itself
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
