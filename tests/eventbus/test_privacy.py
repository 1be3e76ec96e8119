"""G16: secrets reach no subscriber, no log, no repr and no file."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from eventbus import Event, EventBus, ExceptionRaised, Log, PretrainRoutineStart, TrainBatchEnd
from tests.eventbus.samples import Load


def seen(bus: EventBus, event: Event) -> tuple[Any, Any]:
    """The event as an inline hook and as a queued subscriber see it."""
    inline: list[Any] = []
    queued: list[Any] = []

    async def subscriber(event: Event) -> None:
        queued.append(event)

    with bus.subscribe(inline.append), bus.subscribe(subscriber):
        bus.publish(event)
        bus.flush()
    return inline[0], queued[0]


CONFIG = {
    "lr": 0.1,
    "WANDB_API_KEY": "k-123",
    "tracker": {"token": "t-123", "password": "p-123", "name": "mine"},
    "credentials": {"user": "u-123"},
    "hub": [{"hf_token": "h-123"}],
    "tokenizer": "bert",
    "num_tokens": 4096,
    "proxy": "http://user:pw-123@proxy:8080/path",
}


def test_G16_values_whose_keys_look_secret_are_hidden_from_every_subscriber() -> None:
    """At any depth; what only resembles a secret stays."""
    for event in seen(EventBus(), PretrainRoutineStart(config=CONFIG)):
        assert "123" not in repr(event)
        assert event.config["lr"] == 0.1
        assert event.config["tracker"]["name"] == "mine"
        assert event.config["tokenizer"] == "bert"
        assert event.config["num_tokens"] == 4096
        assert event.config["WANDB_API_KEY"] == "[redacted]"


@pytest.mark.parametrize("times", [1, 3])
def test_G16_metrics_and_logged_values_are_hidden_too_however_often_the_key_came(times: int) -> None:
    """A key that once held a number may hold a text later."""
    bus = EventBus()
    for _ in range(times):
        seen(bus, TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"auth_token": 1.0, "loss": 1.0}))
    for event in seen(bus, TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"auth_token": "s-123", "loss": 1.0})):  # type: ignore[dict-item]
        assert "123" not in repr(event)
        assert event.metrics["loss"] == 1.0
    for event in seen(bus, Log(step=1, values={"secret": ["s-123"], "note": "see https://a:b-123@host/x"})):
        assert "123" not in repr(event)


def test_G16_credentials_in_urls_are_hidden_in_texts() -> None:
    for event in seen(EventBus(), ExceptionRaised(message="cannot reach https://me:pw-123@tracker/x")):
        assert "123" not in repr(event)
        assert "tracker/x" in event.message


class Login(Event):
    api_key: str = ""
    user: str = ""


def test_G16_a_field_with_a_secret_name_is_hidden() -> None:
    for event in seen(EventBus(), Login(api_key="k-123", user="me")):
        assert event.api_key == "[redacted]"
        assert event.user == "me"


def test_G16_the_patterns_are_the_users_to_choose() -> None:
    for event in seen(EventBus(redact=["^pin$"]), Load(value={"pin": "123", "token": "shown"})):
        assert event.value == {"pin": "[redacted]", "token": "shown"}
    for event in seen(EventBus(redact=()), Load(value={"token": "shown"})):
        assert event.value == {"token": "shown"}


def test_G16_the_bus_itself_tells_no_values(caplog: pytest.LogCaptureFixture) -> None:
    """Neither repr, describe, stats, report nor its log records hold what was in an event."""
    caplog.set_level(logging.DEBUG)
    bus = EventBus()

    async def broken(event: Event) -> None:
        raise ValueError("broken")

    bus.subscribe(broken)
    bus.publish(Load(value={"password": "p-123", "url": "https://u:p-123@h/"}))
    bus.flush()
    told = [repr(bus), repr(bus.describe()), repr(bus.stats()), bus.report(), caplog.text]
    bus.close()
    assert not any("p-123" in text for text in told)
