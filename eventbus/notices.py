"""What the bus says about itself in the log: each thing once, then once a minute with a count."""

from __future__ import annotations

import logging
from time import monotonic

__all__ = ["Notices", "logger"]

logger = logging.getLogger("eventbus")

_INTERVAL_S = 60.0


class Notices:
    """Rate-limited log records of one bus. Never called while a lock is held or a feeder runs: handlers are foreign."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def say(
        self, level: int, key: str, message: str, *args: object, error: BaseException | None = None, once: bool = False
    ) -> int:
        """Log it unless the same `key` was logged within the last minute (or ever, with `once`).

        Returns how many times it has happened since the last record, this one included; 0 when nothing was logged.
        """
        now = monotonic()
        said = self._said_s.get(key)
        if said is not None and (once or now - said < _INTERVAL_S):
            self._unsaid[key] = self._unsaid.get(key, 0) + 1
            return 0
        self._said_s[key] = now
        repeats = self._unsaid.pop(key, 0)
        if repeats:
            message += f" ({repeats} more times since the last report)"
        trace = (type(error), error, error.__traceback__) if error is not None else None
        logger.log(level, message, *args, exc_info=trace)
        return repeats + 1
