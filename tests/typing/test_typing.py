"""What mypy --strict says about code that uses the packages: nothing about right uses, what is wrong about others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
pytest.importorskip("torch")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ERROR = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: (?P<message>.+?)  \[(?P<code>[a-z-]+)\]$", re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, tuple[str, str]]]:
    """What mypy finds in each file, by line: code and message. One run for both, with the cache of the repository."""
    files = [str(HERE / name) for name in ("accepted.py", "rejected.py")]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", "--hide-error-context", *files]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.stderr == ""
    errors: dict[str, dict[int, tuple[str, str]]] = {"accepted.py": {}, "rejected.py": {}}
    for match in ERROR.finditer(told.stdout):
        errors[Path(match["file"]).name][int(match["line"])] = (match["code"], match["message"])
    return errors


def test_right_uses_are_accepted(found: dict[str, dict[int, tuple[str, str]]]) -> None:
    """A subclass of `Trainer`, a `Callback`, handlers of events, results."""
    assert found["accepted.py"] == {}


def test_wrong_uses_are_rejected_where_they_are(found: dict[str, dict[int, tuple[str, str]]]) -> None:
    lines = (HERE / "rejected.py").read_text(encoding="utf-8").splitlines()
    expected = {number: line.rpartition("# E: ")[2] for number, line in enumerate(lines, 1) if "  # E: " in line}
    assert len(expected) > 25
    assert {number: code for number, (code, _) in found["rejected.py"].items()} == expected
