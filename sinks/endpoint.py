"""One HTTP endpoint: the client that reaches it, one attempt, and the attempts of one message."""

from __future__ import annotations

import http
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from sinks.retry import Retry, retry_after_s
from sinks.threads import finish, in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sinks.redaction import Redactor
    from sinks.signature import Message

__all__ = ["ATTEMPT_LIMIT_S", "Delivery", "Endpoint", "HTTPClient", "Outcome"]

#: The most that one attempt takes, whatever the server drips.
ATTEMPT_LIMIT_S = 30.0
_TIMEOUTS_S = (5.0, 10.0, 10.0, 5.0)  # connect, read, write, pool
_BODY_LIMIT_BYTES = 2048
_BODY_LIMIT_S = 2.0
_CLOSE_LIMIT_S = 2.0
_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
_RETRYABLE = frozenset((408, 425, 429))


class HTTPClient(Protocol):
    """What is used of ``httpx.AsyncClient``, and of any client with its interface."""

    @property
    def build_request(self) -> Callable[..., Any]:
        """Build a request for `send`."""

    @property
    def send(self) -> Callable[..., Awaitable[Any]]:
        """Send a request."""

    @property
    def aclose(self) -> Callable[[], Awaitable[None]]:
        """Close all connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    #: None where no answer came.
    status: int | None = None
    reason: str
    is_retryable: bool = False
    retry_after_s: float | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether the receiver took it: any 2xx."""
        return self.status is not None and 200 <= self.status < 300

    @classmethod
    def of_status(cls, status: int, headers: Mapping[str, str]) -> Outcome:
        """Judge an answer: 2xx is success, 3xx is not followed, 4xx is final but for those that ask to come again."""
        reason = f"it answered {status} {_PHRASES.get(status, '')}".rstrip()
        if 300 <= status < 400:
            reason += " (redirects are not followed)"
        retryable = status in _RETRYABLE or status >= 500
        return cls(
            status=status,
            reason=reason,
            is_retryable=retryable,
            retry_after_s=retry_after_s(headers.get("retry-after")) if retryable else None,
        )


class Endpoint:
    """Sends messages to one URL, on the loop on which it is used; `aclose` ends a wait for the next attempt."""

    def __init__(self, url: str, key: bytes | None, redactor: Redactor, client: HTTPClient, *, is_ours: bool) -> None:
        self._url = url
        self._key = key
        self._redactor = redactor
        self._client: HTTPClient | None = client
        self._is_ours = is_ours
        self._is_suspect = False
        self._closing = anyio.Event()

    @classmethod
    async def open(cls, url: str, key: bytes | None, redactor: Redactor, given: HTTPClient | None) -> Endpoint:
        """Make the client, unless one is `given`; raises what its making raises."""
        # Imports and reading the certificates take up to 0.3 s, in which the loop must not stand still.
        await in_thread(_load_anyio)
        client = await in_thread(_make_client) if given is None else given
        return cls(url, key, redactor, client, is_ours=given is None)

    async def attempt(self, message: Message) -> Outcome:
        """Send `message` once; never raises for what the network does."""
        with self._redactor.watching():
            try:
                client = await self._whole_client()
                self._is_suspect = True
                with anyio.move_on_after(ATTEMPT_LIMIT_S):
                    outcome = await self._post(client, message)
                    self._is_suspect = False
                    return outcome
            except Exception as error:  # noqa: BLE001  # whatever the client raises is how the attempt ended
                return self._failure(error)
        return Outcome(reason=f"no answer within {ATTEMPT_LIMIT_S:g} s", is_retryable=True)

    async def is_closing_within(self, seconds: float) -> bool:
        """Wait, and say whether the wait was ended by `aclose`."""
        with anyio.move_on_after(seconds):
            await self._closing.wait()
        return self._closing.is_set()

    async def aclose(self) -> None:
        """Close the client, if it is ours."""
        self._closing.set()
        await self._close_client()

    async def _whole_client(self) -> HTTPClient:
        """Return the client, a new one of ours if the last attempt was cut off.

        A request that is cancelled can leave httpx's pool one connection short for good.
        """
        if self._is_ours and self._is_suspect:
            await self._close_client()
        if self._client is None:
            self._client = await in_thread(_make_client)
            self._is_suspect = False
        return self._client

    async def _post(self, client: HTTPClient, message: Message) -> Outcome:
        headers = {"user-agent": "trainbus", **message.headers(self._key, int(time.time()))}
        request = client.build_request("POST", self._url, content=message.body, headers=headers, timeout=_TIMEOUTS_S)
        response = await client.send(request, stream=True, follow_redirects=False)
        try:
            await _read_little(response)
        finally:
            await response.aclose()
        return Outcome.of_status(response.status_code, response.headers)

    def _failure(self, error: Exception) -> Outcome:
        kinds = {kind.__name__ for kind in type(error).__mro__}  # by name: it may be httpx's or its successor's
        self._is_suspect = "PoolTimeout" in kinds
        retryable = bool(kinds & {"TransportError", "OSError"}) and not kinds & {"UnsupportedProtocol"}
        return Outcome(reason=self._redactor.text(f"{type(error).__name__} {error}".rstrip()), is_retryable=retryable)

    async def _close_client(self) -> None:
        if self._is_ours and self._client is not None:
            client, self._client = self._client, None
            await finish(self._close(client))

    async def _close(self, client: HTTPClient) -> None:
        with self._redactor.watching(), anyio.move_on_after(_CLOSE_LIMIT_S), suppress(Exception):
            await client.aclose()


async def _read_little(response: Any) -> None:
    """Read a short answer, so that the connection can serve again; a longer one is not worth it."""
    length = response.headers.get("content-length", "0" if response.status_code == 204 else "")
    if length.isdigit() and int(length) <= _BODY_LIMIT_BYTES:
        with anyio.move_on_after(_BODY_LIMIT_S), suppress(Exception):  # the status has decided
            async for _ in response.aiter_raw():
                pass


def _load_anyio() -> None:
    anyio.run(anyio.sleep, 0)  # its first use imports its half for asyncio


def _make_client() -> HTTPClient:
    import httpx

    return httpx.AsyncClient(timeout=httpx.Timeout(_TIMEOUTS_S), trust_env=True, follow_redirects=False)


@dataclass(slots=True)
class Delivery:
    """The attempts to deliver one message; what is known of them is there also when they were interrupted."""

    message: Message
    attempts: int = 0
    outcome: Outcome = field(default=Outcome(reason="it was interrupted before an answer came", is_retryable=True))

    async def run(self, endpoint: Endpoint, retry: Retry) -> Outcome:
        """Try until the message is taken, refused for good, or the schedule is at its end."""
        started_s = anyio.current_time()
        for delay_s in retry.delays_s:
            pause_s = retry.pause_s(delay_s, self.outcome.retry_after_s)
            if anyio.current_time() - started_s + pause_s > retry.total_s:
                break
            if (self.attempts or pause_s) and await endpoint.is_closing_within(pause_s):
                break
            self.outcome = await endpoint.attempt(self.message)
            self.attempts += 1
            if not self.outcome.is_retryable:
                break
        return self.outcome
