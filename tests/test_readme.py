"""README: every Python block runs, the tables are those of the code, and the links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eventbus import EVENTS, Event

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("journal.md", "training.md")]
BLOCKS = re.findall(r"```python\n(.*?)```", "".join([README, *DOCS]), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    """A reader who copies a block into a file can run it, in a fresh process and an empty folder."""
    pytest.importorskip("torch")
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in re.findall(r"# prints: (.*)", BLOCKS[number]):
        assert line in done.stdout


DRIVE_THE_SERVICE = """
import httpx

async def main():
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        print((await client.post("/train")).json())
        print((await client.get("/log")).json())
        print((await client.post("/stop")).json())

asyncio.run(main())
"""


def test_the_service_trains_streams_and_stops(tmp_path: Path) -> None:
    """The FastAPI example does what it says when it is called."""
    pytest.importorskip("fastapi")
    block = next(block for block in BLOCKS if "FastAPI" in block)
    script = tmp_path / "service.py"
    script.write_text(block + DRIVE_THE_SERVICE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "{'loss': 0.5}" in done.stdout
    assert "{'accepted': True}" in done.stdout


def test_the_hook_table_is_that_of_the_code() -> None:
    """Every hook stands in README with its class, what may be shed, and its fields."""
    assert hook_table() in README, f"README should hold:\n{hook_table()}"


def hook_table() -> str:
    common = set(Event.__struct_fields__)
    rows = ["| hook | class | shed | fields |", "|---|---|---|---|"]
    for hook, cls in EVENTS.items():
        if not cls.__module__.startswith("eventbus."):
            continue  # defined by another test
        fields = ", ".join(f"`{name}`" for name in cls.__struct_fields__ if name not in common)
        rows.append(f"| `{hook}` | `{cls.__name__}` | {'yes' if cls.shed else ''} | {fields} |")
    return "\n".join(rows)


def test_each_failure_in_what_happens_when_is_linked_to_a_test() -> None:
    """The table of failures names tests that exist."""
    table = README.split("## What happens when…")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 10
    for row in rows:
        links = re.findall(r"\[([EG]\d+)\]\((tests/[^)]+)\)", row)
        assert links, row
        for guarantee, path in links:
            assert f"test_{guarantee}_" in (ROOT / path).read_text(encoding="utf-8"), (guarantee, path)


def test_every_relative_link_leads_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
