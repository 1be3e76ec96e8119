"""Random subscribers, publishers, policies and interventions: the accounting balances and the order holds.

The long form is ``make chaos``. A failure names its seed; everything random in a run comes from it, only when threads
take turns does not.
"""

from __future__ import annotations

import pytest

from tests.chaos.oracle import judge
from tests.chaos.runner import run
from tests.chaos.scenario import HOSTS, draw

#: Small scenarios on each kind of loop, quick ones by their plan.
SEEDS = [seed for seed in range(400) if draw(seed).events <= 400]
BY_HOST = {host: [seed for seed in SEEDS if draw(seed).host == host][:2] for host in HOSTS}


@pytest.mark.parametrize("seed", [seed for seeds in BY_HOST.values() for seed in seeds])
def test_G6_whatever_happens_the_counts_balance_and_the_order_holds(seed: int) -> None:
    scenario = draw(seed)
    faults = judge(run(scenario))
    assert not faults, "\n".join([f"make chaos ARGS=--replay={seed}", *faults, repr(scenario)])
