"""Many events from eight threads; a small part of what ``make chaos`` does."""

from __future__ import annotations

import pytest

from tests.chaos.soak import soak


def test_G6_a_flood_from_eight_threads_is_counted_exactly_in_flat_memory() -> None:
    assert soak(200_000) == []


@pytest.mark.long
def test_G6_ten_million_events_are_counted_exactly_in_flat_memory() -> None:
    assert soak(10_000_000) == []
