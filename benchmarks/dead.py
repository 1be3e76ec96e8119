"""Subscribers in every kind of trouble; a module without torch, since children import it."""

from __future__ import annotations

import os
import signal
import threading
import time

import anyio

from eventbus import Event

__all__ = ["dies", "hangs", "holds_the_loop", "raises", "stops", "stuck"]


async def raises(event: Event) -> None:
    raise RuntimeError("every time")


async def hangs(event: Event) -> None:
    await anyio.sleep_forever()


async def holds_the_loop(event: Event) -> None:
    time.sleep(0.02)


def stuck(event: Event) -> None:
    threading.Event().wait()


def stops(event: Event) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dies(event: Event) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
