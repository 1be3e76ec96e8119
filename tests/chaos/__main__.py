"""Chaos for as long as you like: ``python -m tests.chaos --seconds=3600 --seed=7``; ``--replay=SEED`` for one run."""

from __future__ import annotations

import argparse
import faulthandler
import pprint
import sys
import time
from collections import Counter

from tests.chaos.lives import draw_lives, live
from tests.chaos.oracle import judge
from tests.chaos.runner import run
from tests.chaos.scenario import draw
from tests.chaos.soak import soak

#: After so long a scenario is stuck, and every thread says where.
_STUCK_S = 180.0
_MOST_SHOWN = 20
#: How many scenarios are run between two series of processes.
_BETWEEN_LIVES = 10


def main() -> int:
    """Run scenarios until the time is over, then soak; returns how many things were faulty."""
    parser = argparse.ArgumentParser(prog="make chaos ARGS=…", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="where to begin; each scenario has a seed of its own")
    parser.add_argument("--soak", type=int, default=10_000_000, help="how many events are soaked at the end")
    parser.add_argument("--replay", type=int, help="run the scenario with this seed, and print its plan")
    parser.add_argument("--lives", type=int, help="run the processes with this seed, and print their plan")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        pprint.pp(draw(arguments.replay), width=160)
        return bool(attempt(arguments.replay))
    if arguments.lives is not None:
        pprint.pp(draw_lives(arguments.lives), width=160)
        return bool(attempt_lives(arguments.lives))
    faulty = run_for(arguments.seconds, arguments.seed * 1_000_000)
    if arguments.soak:
        found = soak(arguments.soak)
        print(f"soak of {arguments.soak} events: {found or 'exact'}")
        faulty += bool(found)
    return min(faulty, 125)


def run_for(seconds: float, first: int) -> int:
    """Run one scenario after the other; returns how many were faulty."""
    until, seed = time.monotonic() + seconds, first
    faulty, events = [], 0
    hosts: Counter[str] = Counter()
    while time.monotonic() < until:
        if attempt(seed) or ((seed - first) % _BETWEEN_LIVES == 0 and attempt_lives(seed)):
            faulty.append(seed)
        scenario = draw(seed)
        events += scenario.events
        hosts[scenario.host] += 1
        seed += 1
        if (seed - first) % 100 == 0:
            print(f"{seed - first} scenarios, {events} events, faulty: {faulty or 'none'}", flush=True)
    print(f"{seed - first} scenarios, {events} events, on {dict(hosts)}, faulty: {faulty or 'none'}")
    return len(faulty)


def attempt(seed: int) -> list[str]:
    """Run one scenario; print and return what is wrong with it."""
    faulthandler.dump_traceback_later(_STUCK_S, exit=False)
    record = run(draw(seed))
    faulthandler.cancel_dump_traceback_later()
    faults = judge(record)
    if faults:
        print(f"\nScenario {seed} is faulty. Replay it: make chaos ARGS=--replay={seed}")
    for fault in faults[:_MOST_SHOWN]:
        print(" -", fault, flush=True)
    return faults


def attempt_lives(seed: int) -> list[str]:
    """The same for several processes after each other."""
    faults = live(seed)
    if faults:
        print(f"\nThe processes of seed {seed} are faulty. Replay them: make chaos ARGS=--lives={seed}")
    for fault in faults[:_MOST_SHOWN]:
        print(" -", fault, flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main())
