"""Scripts in a fresh process on the running Python, as a user writes them: their code, their words, their end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from time import monotonic

__all__ = ["PREAMBLE", "ROOT", "Finished", "run"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Finished:
    """A script that has ended."""

    code: int
    out: list[str]
    err: str
    #: From the line that the script printed with `ends()` to the end of its process, in seconds.
    took_to_end_s: float


PREAMBLE = """
import asyncio, atexit, os, signal, sys, threading, time
from eventbus import *

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, from any thread

def ends():
    say("ends", time.monotonic())
"""


def run(
    source: str,
    *arguments: str,
    timeout: float = 30.0,
    options: tuple[str, ...] = ("-W", "error"),
    path: Path | None = None,
) -> Finished:
    """Run a script in a fresh process on this Python; `say` is its print, and `ends()` marks the end of its main.

    With `path` it is a file, which processes that it spawns can import.
    """
    source = PREAMBLE + dedent(source)
    if path is not None:
        path.write_text(source)
    done = subprocess.run(
        [sys.executable, *options, *(("-c", source) if path is None else (str(path),)), *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    ended = monotonic()
    lines = done.stdout.splitlines()
    marks = [float(line.split()[1]) for line in lines if line.startswith("ends ")]
    out = [line for line in lines if not line.startswith("ends ")]
    return Finished(done.returncode, out, done.stderr, ended - marks[-1] if marks else 0.0)
