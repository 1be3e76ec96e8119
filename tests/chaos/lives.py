"""Several processes after each other on one journal, each ended differently: nothing that was published is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from eventbus import read_journal
from tests.chaos.dying import Tally
from tests.chaos.scenario import Step

__all__ = ["Life", "draw_lives", "live"]

_ROOT = Path(__file__).parents[2]
#: How a life ends: killed in the middle, struck by Ctrl-C all along, or by itself.
_ENDINGS = ("kill", "kill", "kill", "sigint", "exit", "raise", "os_exit", "close")
#: After these the process delivers what is left, so that also who is not durable gets all.
_ORDERLY = ("exit", "raise", "close")

#: Which thread of which life published it, and as which; and what a subscriber got: in which life, and which number.
Event = tuple[int, int]
Got = tuple[int, int, Event]


@dataclass(frozen=True)
class Life:
    """One process."""

    life: int
    ending: str
    #: How many publishes have returned when it is killed.
    at: int
    threads: int
    count: int
    pause_s: float
    durable: dict[str, str]


def draw_lives(seed: int) -> list[Life]:
    """The processes of a seed; the last one closes its bus."""
    random = Random(seed)
    durable = {f"d{i}": random.choice(("async", "thread", "sink")) for i in range(random.randint(1, 3))}
    endings = [random.choice(_ENDINGS) for _ in range(random.randint(1, 4))] + ["close"]
    lives = []
    for life, ending in enumerate(endings):
        threads, count = random.choice((1, 2, 4)), random.choice((200, 1000, 3000))
        at = random.randrange(threads * count)
        pause_s = random.choice((0.0, 0.001, 0.01))
        lives.append(Life(life, ending, at, threads, count, pause_s, durable))
    return lives


def live(seed: int) -> list[str]:
    """Run the processes of a seed; returns what is wrong."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lives-") as name:
        directory = Path(name)
        lives = draw_lives(seed)
        kept: dict[int, Event] = {}
        for life in lives:
            faults += _run(directory, life)
            for event in read_journal(directory / "journal"):
                if not isinstance(event, Step):  # what the bus says about itself
                    continue
                if kept.setdefault(event.seq, (event.who, event.n)) != (event.who, event.n):
                    faults.append(f"number {event.seq} is two events")
        faults += _judge(directory, lives, kept)
    return faults


def _run(directory: Path, life: Life) -> list[str]:
    tally = Tally(directory / f"returned-{life.life}")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.chaos.dying", str(directory), str(life.life), _plan(life)],
        cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()  # it is ready
    while process.poll() is None and tally.count() < life.threads * life.count:
        if life.ending == "kill" and tally.count() >= life.at:
            process.send_signal(signal.SIGKILL)
            break
        if life.ending == "sigint" and not tally.is_over:
            process.send_signal(signal.SIGINT)
        time.sleep(0.0005)
    if life.ending == "kill":
        process.send_signal(signal.SIGKILL)
    try:
        _, said = process.communicate(timeout=90.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        return [f"life {life} did not end: {process.communicate()[1].decode()}"]
    return _end(life, process.returncode, said.decode())


def _plan(life: Life) -> str:
    return json.dumps(asdict(life))


def _end(life: Life, code: int, said: str) -> list[str]:
    expected = {"kill": -signal.SIGKILL, "raise": 1}.get(life.ending, 0)
    lines = [line for line in said.splitlines() if "Error" in line or "Fatal" in line or "ignored" in line]
    strange = [line for line in lines if "LookupError" not in line and "ValueError" not in line]
    if code != expected or strange:
        return [f"life {life} ended with {code}, not {expected}, and said {said[-1500:]}"]
    return []


def _judge(directory: Path, lives: list[Life], kept: dict[int, Event]) -> list[str]:
    faults = []
    got = {name: _read(directory / f"got-{name}") for name in ("plain", *lives[0].durable)}
    everything = set(kept.values()) | {event for lines in got.values() for _, _, event in lines}
    for life in lives:
        tally = Tally(directory / f"returned-{life.life}")
        returned = {(life.life * 100 + who, n) for who in range(life.threads) for n in range(tally.words[who])}
        if life.ending == "sigint":  # those of the main thread that were struck may be missing
            returned = {event for event in returned if event[0] % 100 or event in everything}
        lost = returned - everything
        if lost:
            faults.append(f"life {life} lost {len(lost)} events whose publish had returned: {sorted(lost)[:5]}")
        plain = {event for number, _, event in got["plain"] if number == life.life}
        if life.ending in _ORDERLY and returned - plain:
            faults.append(f"life {life} did not deliver {len(returned - plain)} at its end")
    for name, kind in lives[0].durable.items():
        faults += [f"{name} ({kind}): {fault}" for fault in _judge_durable(got[name], kept, kind)]
    return faults


def _judge_durable(got: list[tuple[int, int, tuple[int, int]]], kept: dict[int, Event], kind: str) -> list[str]:
    faults = []
    by_life: dict[int, list[int]] = defaultdict(list)
    for life, seq, event in got:
        by_life[life].append(seq)
        if kept.get(seq, event) != event:
            faults.append(f"number {seq} is {event} here, and {kept[seq]} in the journal")
    last = 0
    for life, seqs in sorted(by_life.items()):
        if seqs != sorted(set(seqs)):
            faults.append(f"life {life} got events twice or out of order")
        if kind != "sink" and seqs[0] < last:
            faults.append(f"life {life} began with {seqs[0]} again, though {last} was the last begun before")
        last = seqs[-1]
    missing = set(kept) - {seq for _, seq, _ in got}
    if missing:
        faults.append(f"it never got {len(missing)} events: {sorted(missing)[:5]}")
    return faults


def _read(path: Path) -> list[Got]:
    if not path.exists():
        return []
    lines = [tuple(map(int, line.split())) for line in path.read_text(encoding="ascii").splitlines()]
    return [(life, seq, (who, n)) for life, seq, who, n in lines]
