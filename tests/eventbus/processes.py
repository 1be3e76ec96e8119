"""Programs in a fresh interpreter, for what would disturb this one: signals, its own memory, its exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

__all__ = ["run_program"]

_ROOT = Path(__file__).parents[2]


def run_program(source: str, *arguments: str, timeout: float = 120.0, **environ: str) -> str:
    """Run `source` with warnings as errors; returns what it printed, and fails unless it ends well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", dedent(source), *arguments],
        cwd=_ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.stdout
