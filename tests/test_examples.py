"""Every example runs as it stands and says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "early_warning.py": ("is far above its average", "stop: the loss is not finite (asked by watch", "ended: stopped"),
    "ultralytics_callback.py": ("epoch 1/50: fitness", "stopped after"),
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
