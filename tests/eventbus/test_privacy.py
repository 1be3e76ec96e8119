"""G16: secrets reach no subscriber, no log, no repr and no file."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from eventbus import (
    Event,
    EventBus,
    ExceptionRaised,
    Log,
    PretrainRoutineStart,
    SubscriberErrorEvent,
    TrainBatchEnd,
    encode,
)
from tests.eventbus.samples import Load
from tests.eventbus.waiting import until


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
    "WANDB_API_KEY": "k-hush",
    "tracker": {"token": "t-hush", "password": "p-hush", "name": "mine"},
    "credentials": {"user": "u-hush"},
    "hub": [{"hf_token": "h-hush"}],
    "tokenizer": "bert",
    "num_tokens": 4096,
    "proxy": "http://user:pw-hush@proxy:8080/path",
}


def test_G16_values_whose_keys_look_secret_are_hidden_from_every_subscriber() -> None:
    """At any depth; what only resembles a secret stays."""
    for event in seen(EventBus(), PretrainRoutineStart(config=CONFIG)):
        assert "hush" not in repr(event)
        assert event.config["lr"] == 0.1
        assert event.config["tracker"]["name"] == "mine"
        assert event.config["tokenizer"] == "bert"
        assert event.config["num_tokens"] == 4096
        assert event.config["WANDB_API_KEY"] == "[redacted]"


@pytest.mark.parametrize(
    "key", ["password", "DB_PASSWD", "passphrase", "HF_TOKEN", "X-Api-Key", "apikey", "aws_secret_access_key",
            "private-key", "Authorization", "slack_webhook", "client_secret", "credentials"]
)  # fmt: skip
def test_G16_the_usual_names_of_secrets_are_known(key: str) -> None:
    """By any part of the name, in any case."""
    for event in seen(EventBus(), PretrainRoutineStart(config={key: "hush", "inner": {key: ["hush"]}})):
        assert "hush" not in repr(event)
        assert "hush" not in encode(event).decode()


def test_G16_what_the_publisher_holds_is_left_as_it_is() -> None:
    """Only the copy that subscribers see is redacted."""
    config = copy.deepcopy(CONFIG)
    seen(EventBus(), PretrainRoutineStart(config=config))
    assert config == CONFIG


@pytest.mark.parametrize("times", [1, 3])
def test_G16_metrics_and_logged_values_are_hidden_too_however_often_the_key_came(times: int) -> None:
    """A key that once held a number may hold a text later."""
    bus = EventBus()
    for _ in range(times):
        seen(bus, TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"auth_token": 1.0, "loss": 1.0}))
    for event in seen(bus, TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"auth_token": "s-hush", "loss": 1.0})):  # type: ignore[dict-item]
        assert "hush" not in repr(event)
        assert event.metrics["loss"] == 1.0
    for event in seen(bus, Log(step=1, values={"secret": ["s-hush"], "note": "see https://a:b-hush@host/x"})):
        assert "hush" not in repr(event)


def test_G16_credentials_in_urls_are_hidden_in_texts() -> None:
    for event in seen(EventBus(), ExceptionRaised(message="cannot reach https://me:pw-hush@tracker/x")):
        assert "hush" not in repr(event)
        assert "tracker/x" in event.message


URLS = {
    "https://me:hush@host/x": "https://[redacted]@host/x",
    "see https://me:hu@hush@host/x?token=hush&a=b#top, please": "see https://[redacted]@host/x?[redacted]#top, please",
    "PUT 'https://host/b/k.pt?X-Amz-Signature=hush' failed": "PUT 'https://host/b/k.pt?[redacted]' failed",
    "https://a:hush@h/?x=hush and s3://id:hush@b/k": "https://[redacted]@h/?[redacted] and s3://[redacted]@b/k",
    "why? because: a@b.c": "why? because: a@b.c",
}


@pytest.mark.parametrize("text", URLS)
def test_G16_credentials_and_queries_of_urls_are_hidden_wherever_a_text_may_be(text: str) -> None:
    """In a text of its own, in a container, in a metric: the rest of it stays."""
    bus = EventBus()
    shown = URLS[text]
    metrics: Any = {"loss": 1.0, "note": text}
    seen(bus, TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"note": 1.0, "loss": 1.0}))
    for _ in range(2):
        for event in seen(bus, TrainBatchEnd(epoch=0, batch=0, step=1, metrics=metrics, status=text)):
            assert (event.metrics["note"], event.status) == (shown, shown)
        for event in seen(bus, Load(value={"a": [text, {"b": text}]})):
            assert event.value == {"a": (shown, {"b": shown})}


@pytest.mark.parametrize("kind", ["inline", "async", "thread", "when"])
def test_G16_what_a_handler_raises_is_reported_without_credentials(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the log, its traceback included, nor `on_subscriber_error` shows those in the message of an error."""
    told: list[SubscriberErrorEvent] = []

    def fail(event: Event) -> bool:
        try:
            raise OSError("PUT https://me:hush@host/x?sig=hush failed")
        except OSError as error:
            raise RuntimeError("cannot tell https://host/x?sig=hush") from error

    async def fail_later(event: Event) -> None:
        fail(event)

    async def listen(event: SubscriberErrorEvent) -> None:
        told.append(event)

    with EventBus() as bus:
        if kind == "when":
            bus.subscribe(lambda _: None, Load, name="bad", when=fail, run_in="thread")
        elif kind == "async":
            bus.subscribe(fail_later, Load, name="bad")
        else:
            bus.subscribe(fail, Load, name="bad", **({"run_in": "thread"} if kind == "thread" else {}))
        bus.subscribe(listen, SubscriberErrorEvent)
        bus.publish(Load())
        until(lambda: "bad" in caplog.text)
        assert bus.flush()
        assert bus.flush()
    logged = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "hush" not in logged + repr(told)
    assert "RuntimeError: cannot tell https://host/x?[redacted]" in logged
    assert "in fail" in logged, "the traceback is there, as a text"
    assert [event.reason for event in told] == ["RuntimeError: cannot tell https://host/x?[redacted]"] * len(told)


def test_G16_other_tracebacks_are_logged_as_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    """Tools that read the error of a log record still find it there."""
    bus = EventBus()

    def fail(event: Event) -> None:
        raise RuntimeError("nothing secret")

    bus.subscribe(fail, Load)
    bus.publish(Load())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)


class Login(Event):
    api_key: str = ""
    user: str = ""
    credentials: Any = None
    tokens: tuple[Any, ...] = ()
    token_count: int = 0


def test_G16_a_field_with_a_secret_name_is_hidden() -> None:
    login = Login(api_key="k-hush", user="me", credentials={"a": ["hush"], "n": 1}, tokens=("hush",), token_count=3)
    for event in seen(EventBus(), login):
        assert event.api_key == "[redacted]"
        assert (event.user, event.token_count) == ("me", 3)
        assert event.credentials == {"a": ("[redacted]",), "n": 1}
        assert event.tokens == ("[redacted]",)
    for event in seen(EventBus(), Login(credentials=b"hush")):
        assert event.credentials == "[redacted]"


def test_G16_the_patterns_are_the_users_to_choose() -> None:
    for event in seen(EventBus(redact=["^pin$"]), Load(value={"pin": "hush", "token": "shown"})):
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
    bus.publish(Load(value={"password": "p-hush", "url": "https://u:p-hush@h/"}))
    bus.flush()
    told = [repr(bus), repr(bus.describe()), repr(bus.stats()), bus.report(), caplog.text]
    bus.close()
    assert not any("p-hush" in text for text in told)
