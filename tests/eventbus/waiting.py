"""Waiting for a state instead of sleeping for luck."""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until", "until_in_task"]


def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Block until `condition()` holds; fail after `timeout` seconds."""
    end = monotonic() + timeout
    while not condition():
        assert monotonic() < end, "the awaited state was never reached"
        sleep(0.002)


async def until_in_task(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """The same, letting the loop run meanwhile."""
    end = monotonic() + timeout
    while not condition():
        assert monotonic() < end, "the awaited state was never reached"
        await anyio.sleep(0.002)
