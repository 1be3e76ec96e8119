"""What the tests of the sinks share: both loops, a receiver, and events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sinks.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver().start()
    yield server
    server.stop()
