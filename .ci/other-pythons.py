"""Run the tests of eventbus and sinks on every other CPython that is found: pyenv's, and `python3.X` on the PATH.

Versions fork, exit and start threads differently. Each gets a virtual environment of its own, `.venv-3.X`, through
`make test-bus`. One that cannot be set up, or whose tests fail, fails the whole; one that is not there is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Those that are promised; newer ones are tested where they are found.
PROMISED = {(3, 11), (3, 12), (3, 13)}
OLDEST = min(PROMISED)
HERE = (sys.version_info.major, sys.version_info.minor)

ASK = """
import json, sys, sysconfig
about = sys.version_info[:2], sys.implementation.name, bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([*about, sys.executable]))
"""


def main() -> int:
    """Test them one after the other; returns how many failed."""
    found = found_pythons()
    for version in sorted(PROMISED - {HERE, *found}):
        print(f"skipped: Python {name(version)} was not found (by pyenv, or as python{name(version)} on the PATH)")
    outcomes = {version: is_passed(version, python) for version, python in sorted(found.items())}
    print(f"Python {name(HERE)}: passed (the whole suite)")
    for version, passed in outcomes.items():
        print(f"Python {name(version)}: {'passed' if passed else 'FAILED'} (eventbus and sinks)")
    return list(outcomes.values()).count(False)


def is_passed(version: tuple[int, int], python: str) -> bool:
    """Set up and test one."""
    print(f"\nPython {name(version)}: {python}", flush=True)
    # Without the flags of the make that started this: that one's PYTHON and VENV would win.
    environ = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKEOVERRIDES", "VENV")}
    command = ["make", "--no-print-directory", "test-bus", f"PYTHON={python}", f"VENV=.venv-{name(version)}"]
    return subprocess.run(command, env=environ, check=False).returncode == 0


def found_pythons() -> dict[tuple[int, int], str]:
    """The first interpreter found of each version but this one."""
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates():
        about = asked(candidate)
        if about is None:  # a shim of a version that is not switched on, or a broken link: not there
            continue
        (major, minor), implementation, is_free_threaded, executable = about
        version = (major, minor)
        if implementation == "cpython" and not is_free_threaded and version >= OLDEST and version != HERE:
            found.setdefault(version, executable)
    return found


def candidates() -> Iterator[Path]:
    """Yield what may be an interpreter, pyenv's first and the newest of each version before older ones."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(root.glob("versions/3.*/bin/python"), key=numbers, reverse=True)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from (Path(folder, f"python3.{minor}") for minor in range(OLDEST[1], 30))


def numbers(path: Path) -> list[int]:
    """The numbers in a path, so that 3.12.10 is newer than 3.12.9."""
    return [int(part) for part in path.parts[-3].split(".") if part.isdigit()]


def asked(python: Path) -> Any:
    """What an interpreter says it is; None when it does not run."""
    if not os.access(python, os.X_OK):
        return None
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def name(version: tuple[int, int]) -> str:
    """3.12"""
    return f"{version[0]}.{version[1]}"


if __name__ == "__main__":
    sys.exit(main())
