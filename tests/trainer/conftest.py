"""What the tests of the trainer share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eventbus import EventBus
from tests.trainer.pair import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def bus() -> Iterator[EventBus]:
    bus = EventBus(run="test")
    yield bus
    bus.close()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two processes that train together; started by the first test that needs them."""
    pair = Pair()
    yield pair
    assert not any(pair.close())  # D5: whatever they went through, they end by themselves, with 0
