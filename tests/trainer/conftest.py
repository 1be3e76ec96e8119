"""What the tests of the trainer share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eventbus import EventBus

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
