"""Processes that are killed, struck and ended in every way lose nothing that was published."""

from __future__ import annotations

import pytest

from tests.chaos.lives import draw_lives, live


def _is_short(seed: int, ending: str) -> bool:
    lives = draw_lives(seed)
    return len(lives) == 2 and lives[0].ending == ending and max(life.count * life.threads for life in lives) <= 2000


@pytest.mark.parametrize("ending", ["kill", "sigint", "exit"])
def test_G17_however_a_process_ends_the_next_one_goes_on_where_it_was(ending: str) -> None:
    seed = next(seed for seed in range(10_000) if _is_short(seed, ending))
    faults = live(seed)
    assert not faults, "\n".join([f"make chaos ARGS=--lives={seed}", *faults])
