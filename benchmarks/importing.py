"""What importing the bus costs a process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.measure import Row, ratio_row


def rows() -> Iterator[Row]:
    nothing, asyncio, ours = ([] for _ in range(3))
    for _ in range(15):
        nothing.append(seconds("pass"))
        asyncio.append(seconds("import asyncio"))
        ours.append(seconds("import eventbus, sys; assert 'torch' not in sys.modules"))
    base = min(nothing)
    yield ratio_row(
        "import eventbus / import asyncio, above an empty process", min(ours) - base, min(asyncio) - base, "≤ 2 ×",
        unit="s", most=2,
    )  # fmt: skip


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started
