"""Events to a URL, by the Standard Webhooks contract."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eventbus.errors import SinkGone, SinkUnavailable
from eventbus.filters import is_for_real
from eventbus.sink import encoded
from sinks.endpoint import ATTEMPT_LIMIT_S, Delivery, Endpoint, HTTPClient
from sinks.errors import WebhookError
from sinks.redaction import Redactor
from sinks.retry import Retry
from sinks.signature import Message, signing_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eventbus.events import Event

__all__ = ["DeadLetter", "WebhookSink"]

_HOOKS = (
    "on_train_start",
    "on_fit_epoch_end",
    "on_model_save",
    "on_checkpoint_failed",
    "on_exception",
    "on_train_end",
)
_MOST_DEAD_LETTERS = 1_000
_ONCE = Retry(delays_s=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event that was given up. `status` is None where no answer came; `attempts` counts all of them."""

    event: Event
    id: str
    reason: str
    status: int | None
    attempts: int


class WebhookSink:
    """Posts each event to `url` as ``{"type": hook, "timestamp": …, "data": the event}``, in order, one at a time.

    With a `secret` (``whsec_…``, or any string of 24 bytes or more) it is signed, so that the receiver knows the
    sender; use an https URL, or everybody on the way can read it. The id of an event never changes: a receiver that
    keeps the ids of a few minutes handles each once. What is not taken within `retry` goes to `dead_letters` (the
    last 1,000) and counts as failed; a 410 ends the subscription. `client`: an ``httpx.AsyncClient`` or one like
    it, with its own proxies or certificates; it is neither closed nor pickled. `on_pretrain_routine_start` is sent
    without its `config`. A trial validation before a training (phase "sanity") is not sent, unless it is attached with
    a `when` of one's own, or with None.
    """

    max_batch = 1
    flush_interval = 0.0

    def __init__(
        self,
        url: str,
        *,
        hooks: str | Iterable[str] = _HOOKS,
        secret: str | bytes | None = None,
        format: Literal["standard"] = "standard",
        retry: Retry | None = None,
        client: HTTPClient | None = None,
    ) -> None:
        if format != "standard":
            raise ValueError(f"There is no webhook format {format!r}. Use 'standard'.")
        if client is not None and not all(hasattr(client, name) for name in ("build_request", "send", "aclose")):
            raise TypeError(f"client must be an httpx.AsyncClient or one like it, not {type(client).__name__}.")
        self._key = signing_key(secret)
        self._redactor = Redactor(url, secret.decode("latin-1") if isinstance(secret, bytes) else secret)
        self._url = url
        self._given = client
        self._endpoint: Endpoint | None = None
        self._dead: deque[DeadLetter] = deque(maxlen=_MOST_DEAD_LETTERS)
        self.hooks = (hooks,) if isinstance(hooks, str) else tuple(hooks)
        self.retry = Retry() if retry is None else retry

    def __repr__(self) -> str:
        return f"WebhookSink({self._redactor.origin + '/…'!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None, "_endpoint": None, "_dead": deque(maxlen=_MOST_DEAD_LETTERS)}

    @property
    def options(self) -> Mapping[str, Any]:
        """The bus waits longer than all attempts take, so that it is the sink that gives up."""
        return {"timeout": self.retry.total_s + ATTEMPT_LIMIT_S + 30.0, "when": is_for_real}

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The events that were given up, the oldest first."""
        return list(self._dead)

    async def open(self) -> None:
        """Make the HTTP client; nothing is sent yet."""
        self._endpoint = await self._new_endpoint()

    async def write(self, events: Sequence[Event], /) -> None:
        """Deliver `events`; raise `WebhookError` for one that was given up, `SinkGone` where nothing more is wanted."""
        endpoint = self._endpoint = self._endpoint or await self._new_endpoint()
        refused: WebhookError | None = None
        for event, line in zip(events, encoded(events), strict=True):
            refused = await self._deliver(endpoint, event, line) or refused
        if refused is not None:
            raise refused

    async def aclose(self) -> None:
        """Close the HTTP client; an event that waits for its next attempt becomes a dead letter."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.aclose()

    async def resend(self) -> int:
        """Try each dead letter once more, with its first id, and return how many were taken; the others stay.

        Works on any loop, also after the bus is closed.
        """
        taken = 0
        endpoint = await self._new_endpoint()
        try:
            for letter in self.dead_letters:
                taken += await self._resend(endpoint, letter)
        finally:
            await endpoint.aclose()
        return taken

    async def _new_endpoint(self) -> Endpoint:
        try:
            return await Endpoint.open(self._url, self._key, self._redactor, self._given)
        except Exception as error:  # noqa: BLE001  # certificates, proxy settings, the import: told without secrets
            problem = self._redactor.text(f"{type(error).__name__} {error}")
        raise SinkUnavailable(f"{self!r} cannot make its HTTP client: {problem}")

    async def _deliver(self, endpoint: Endpoint, event: Event, line: bytes) -> WebhookError | None:
        delivery = Delivery(Message.of(event, line))
        try:
            outcome = await delivery.run(endpoint, self.retry)
        except BaseException:  # cancelled: it can still be sent again
            self._bury(event, delivery)
            raise
        if outcome.is_delivered:
            return None
        self._bury(event, delivery)
        if outcome.status == 410:
            raise SinkGone(f"{self._redactor.origin} answered 410 Gone: it wants no more events.")
        return WebhookError(self._redactor.origin, event.hook, delivery.message.id, delivery.attempts, outcome.reason)

    async def _resend(self, endpoint: Endpoint, letter: DeadLetter) -> bool:
        delivery = Delivery(Message.of(letter.event, encoded([letter.event])[0]), attempts=letter.attempts)
        outcome = await delivery.run(endpoint, _ONCE)
        if letter in self._dead:
            place = self._dead.index(letter)
            if outcome.is_delivered:
                del self._dead[place]
            else:
                self._dead[place] = _letter(letter.event, delivery)
        return outcome.is_delivered

    def _bury(self, event: Event, delivery: Delivery) -> None:
        self._dead.append(_letter(event, delivery))


def _letter(event: Event, delivery: Delivery) -> DeadLetter:
    return DeadLetter(
        event=event,
        id=delivery.message.id,
        reason=delivery.outcome.reason,
        status=delivery.outcome.status,
        attempts=delivery.attempts,
    )
