"""WebhookSink against a real server on loopback that answers well, badly or not at all."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import pickle
import random
import re
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

import sinks.endpoint
import sinks.retry
import sinks.webhook
from eventbus.codec import decode
from eventbus.errors import EventBusError, SinkGone, SinkUnavailable
from eventbus.events import EVENTS, FitEpochEnd, PretrainRoutineStart
from sinks import Retry, WebhookError, WebhookSink
from sinks.retry import retry_after_s
from tests.sinks.receiver import (
    Answer,
    Receiver,
    drip_body,
    drip_headers,
    endless_body,
    garbage,
    hang,
    reset,
    status,
)

pytestmark = pytest.mark.anyio
QUICK = Retry(delays_s=(0, 0, 0))
KEY = bytes(range(24))
SECRET = "whsec_" + base64.b64encode(KEY).decode()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # trio: see the contract, and `both` here


both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


def epoch(number: int = 0, **fields: Any) -> FitEpochEnd:
    values = {"run": "r1", "rank": 0, "seq": number + 1, "time": 1.8e9, "metrics": {"val/loss": float("nan")}}
    return FitEpochEnd(epoch=number, **{**values, **fields})


async def send(sink: WebhookSink, *events: FitEpochEnd | PretrainRoutineStart) -> None:
    await sink.open()
    try:
        for event in events:
            await sink.write([event])
    finally:
        await sink.aclose()


class TestMessage:
    async def test_the_body_is_type_timestamp_and_the_flat_event(self, receiver: Receiver) -> None:
        """In strict JSON; the time is the event's, not the attempt's."""
        await send(WebhookSink(receiver.url()), epoch(3, time=1_800_000_000.25))
        (request,) = receiver.requests
        assert request.line.startswith("POST / HTTP/1.1")
        assert request.headers["content-type"] == "application/json"
        assert list(request.json) == ["type", "timestamp", "data"]
        assert request.json["type"] == "on_fit_epoch_end"
        assert request.json["timestamp"] == "2027-01-15T08:00:00.250000Z"
        assert request.json["data"]["metrics"] == {"val/loss": "NaN"}
        event = decode(sinks.webhook.encoded([epoch(3)])[0])
        assert isinstance(event, FitEpochEnd)

    async def test_a_time_that_is_none_is_no_reason_to_fail(self, receiver: Receiver) -> None:
        await send(WebhookSink(receiver.url()), *(epoch(time=value) for value in (0.0, float("nan"), 1e30)))
        assert {body["timestamp"] for body in receiver.bodies} == {"1970-01-01T00:00:00.000000Z"}

    async def test_a_configuration_stays_at_home(self, receiver: Receiver) -> None:
        await send(WebhookSink(receiver.url()), PretrainRoutineStart(config={"api": "private"}, name="resnet"))
        assert b"private" not in receiver.requests[0].body
        assert "config" not in receiver.bodies[0]["data"]
        assert receiver.bodies[0]["data"]["name"] == "resnet"

    def test_its_default_hooks_are_rare_and_real(self) -> None:
        assert set(WebhookSink("https://example.com").hooks) == {
            *("on_train_start", "on_fit_epoch_end", "on_model_save", "on_checkpoint_failed"),
            *("on_exception", "on_train_end"),
        }
        assert set(WebhookSink("https://example.com").hooks) <= set(EVENTS)

    @pytest.mark.parametrize("secret", [SECRET, KEY, "a long text as it stands 0123456789"])
    async def test_every_attempt_is_signed_anew_over_the_bytes_that_are_sent(
        self, receiver: Receiver, secret: str | bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Same id and body, the time of the attempt; checked by hand and by the reference library."""
        now = iter([time.time() - 7, time.time() - 3])
        monkeypatch.setattr(sinks.endpoint, "time", SimpleNamespace(time=lambda: next(now)))
        receiver.script.append(status(503))
        await send(WebhookSink(receiver.url(), secret=secret, retry=QUICK), epoch())
        monkeypatch.undo()
        first, second = receiver.requests
        key = KEY if secret == SECRET else secret if isinstance(secret, bytes) else secret.encode()
        for request in (first, second):
            moment = request.headers["webhook-timestamp"]
            assert moment.isdigit()
            signed = f"{request.headers['webhook-id']}.{moment}.".encode() + request.body
            expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
            assert request.headers["webhook-signature"] == f"v1,{expected}"
        assert int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"]) in (3, 4, 5)
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert first.body == second.body
        reference = pytest.importorskip("standardwebhooks").Webhook("whsec_" + base64.b64encode(key).decode())
        assert reference.verify(second.body, second.headers) == second.json

    async def test_without_a_secret_there_is_an_id_and_no_signature(self, receiver: Receiver) -> None:
        await send(WebhookSink(receiver.url()), epoch())
        headers = receiver.requests[0].headers
        assert re.fullmatch(r"msg_[0-9a-f]{32}", headers["webhook-id"])
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
        assert "webhook-signature" not in headers

    async def test_an_id_belongs_to_one_event_for_ever(self, receiver: Receiver) -> None:
        """The same in a later process; another for another event, rank, attempt, or a run of the same name."""
        events = [epoch(), epoch(1), epoch(rank=1), epoch(attempt=1), epoch(run="r2"), epoch(time=1.8e9 + 60)]
        await send(WebhookSink(receiver.url()), *events)
        await send(pickle.loads(pickle.dumps(WebhookSink(receiver.url(), secret=SECRET))), *events)
        ids = [request.headers["webhook-id"] for request in receiver.requests]
        assert len(set(ids)) == len(events)
        assert ids[: len(events)] == ids[len(events) :]


class TestAnswers:
    @pytest.mark.parametrize("code", [200, 201, 202, 204, 299])
    async def test_any_2xx_is_success(self, receiver: Receiver, code: int) -> None:
        receiver.otherwise = status(code, body=b"" if code == 204 else b"ok")
        sink = WebhookSink(receiver.url(), retry=QUICK)
        await send(sink, epoch(0), epoch(1))
        assert (len(receiver.requests), sink.dead_letters) == (2, [])

    @pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 413, 422, 451])
    async def test_other_4xx_are_final(self, receiver: Receiver, code: int) -> None:
        receiver.otherwise = status(code)
        sink = WebhookSink(receiver.url(), retry=QUICK)
        with pytest.raises(
            WebhookError, match=rf"did not take on_fit_epoch_end \(msg_\w+\) in 1 attempt: it answered {code}"
        ):
            await send(sink, epoch())
        assert len(receiver.requests) == 1
        assert [letter.status for letter in sink.dead_letters] == [code]

    @pytest.mark.parametrize(
        "answer",
        [*(status(code) for code in (408, 425, 429, 500, 502, 503, 504, 599)), garbage, reset],
        ids=lambda answer: getattr(answer, "__name__", ""),
    )
    @both
    async def test_what_may_pass_is_tried_again(self, receiver: Receiver, answer: Answer, anyio_backend: str) -> None:
        """Server errors, throttling, broken connections and nonsense."""
        receiver.script.extend([answer, answer])
        sink = WebhookSink(receiver.url(), retry=QUICK)
        await send(sink, epoch(0), epoch(1))
        assert [body["data"]["epoch"] for body in receiver.bodies] == [0, 0, 0, 1]
        assert sink.dead_letters == []

    @pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
    async def test_a_redirect_is_a_failure_and_not_followed(self, receiver: Receiver, code: int) -> None:
        receiver.otherwise = status(code, {"location": receiver.url("/elsewhere")})
        async with httpx.AsyncClient(follow_redirects=True) as client:
            for given in (None, client):
                with pytest.raises(WebhookError, match=rf"it answered {code} .*\(redirects are not followed\)"):
                    await send(WebhookSink(receiver.url(), retry=QUICK, client=given), epoch())
        assert [request.line.split()[1] for request in receiver.requests] == ["/", "/"]

    async def test_410_ends_it(self, receiver: Receiver) -> None:
        """The receiver wants no more; the event is kept all the same."""
        receiver.otherwise = status(410)
        sink = WebhookSink(receiver.url("/private"), retry=QUICK)
        with pytest.raises(
            SinkGone, match=rf"^http://127\.0\.0\.1:{receiver.port} answered 410 Gone: it wants no more"
        ):
            await send(sink, epoch())
        assert len(receiver.requests) == 1
        assert [letter.status for letter in sink.dead_letters] == [410]

    async def test_one_connection_serves_all(self, receiver: Receiver) -> None:
        await send(WebhookSink(receiver.url()), *(epoch(n) for n in range(10)))
        assert len(receiver.requests) == 10
        assert receiver.connections == 1


class TestLimits:
    """No server keeps an attempt longer than its limits; the next attempt has a whole client."""

    @pytest.mark.parametrize("answer", [hang, drip_headers])
    @both
    async def test_a_server_that_never_comes_to_an_end(
        self, receiver: Receiver, answer: Answer, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Silence ends at the read timeout, a header that drips for ever at the limit of the attempt."""
        monkeypatch.setattr(sinks.endpoint, "_TIMEOUTS_S", (1.0, 0.1, 1.0, 1.0))
        monkeypatch.setattr(sinks.endpoint, "ATTEMPT_LIMIT_S", 0.3)
        receiver.script.extend([answer, answer])
        sink = WebhookSink(receiver.url(), retry=QUICK)
        started = time.monotonic()
        await send(sink, epoch(0), epoch(1))
        assert 0.2 <= time.monotonic() - started < 5
        assert [body["data"]["epoch"] for body in receiver.bodies] == [0, 0, 0, 1]

    async def test_it_says_what_it_waited_for(self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sinks.endpoint, "ATTEMPT_LIMIT_S", 0.1)
        receiver.otherwise = drip_headers
        with pytest.raises(WebhookError, match=r"in 3 attempts: no answer within 0\.1 s\. It is kept"):
            await send(WebhookSink(receiver.url(), retry=QUICK), epoch())

    @pytest.mark.parametrize("answer", [drip_body, endless_body])
    @both
    async def test_the_body_of_an_answer_holds_nothing_up(
        self, receiver: Receiver, answer: Answer, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The status has decided; of the body little is read, and not for long."""
        monkeypatch.setattr(sinks.endpoint, "_BODY_LIMIT_S", 0.1)
        receiver.script.append(answer)
        started = time.monotonic()
        await send(WebhookSink(receiver.url(), retry=QUICK), epoch(0), epoch(1))
        assert time.monotonic() - started < 5
        assert len(receiver.requests) == 2
        assert receiver.bytes_sent < 16 << 20  # what the sockets hold

    @both
    async def test_a_refused_connection_is_tried_again(self, receiver: Receiver, anyio_backend: str) -> None:
        receiver.stop()
        sink = WebhookSink(receiver.url(), retry=QUICK)
        with pytest.raises(WebhookError, match=r"in 3 attempts: ConnectError "):
            await send(sink, epoch())
        receiver.start()
        await send(sink, epoch(1))
        assert len(receiver.requests) == 1
        assert [(letter.status, letter.attempts) for letter in sink.dead_letters] == [(None, 3)]

    def test_the_bus_waits_longer_than_the_sink_tries(self) -> None:
        retry = Retry(total_s=100)
        assert WebhookSink("https://example.com", retry=retry).options["timeout"] > 100 + sinks.endpoint.ATTEMPT_LIMIT_S


class TestRetry:
    @pytest.fixture
    def pauses(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The pauses that were made, none of them really; each is the longest that jitter allows."""
        found: list[float] = []

        async def pass_at_once(self: object, seconds: float) -> bool:
            found.append(seconds)
            return False

        monkeypatch.setattr(sinks.endpoint.Endpoint, "is_closing_within", pass_at_once)
        monkeypatch.setattr(sinks.retry._random, "uniform", lambda low, high: high)
        return found

    async def test_the_default_schedule_then_the_dead_letters(self, receiver: Receiver, pauses: list[float]) -> None:
        receiver.otherwise = status(500)
        sink = WebhookSink(receiver.url())
        with pytest.raises(WebhookError, match="in 6 attempts: it answered 500 Internal Server Error"):
            await send(sink, epoch())
        assert pauses == [1, 5, 30, 120, 300]

    @pytest.mark.parametrize(
        ("header", "pause"),
        [
            *(("0.4", 5), ("7", 7), ("86400", 300), ("inf", 300), ("-3", 5), ("nan", 5), ("soon", 5), ("", 5)),
            # With names, since two processes that collect the tests in different seconds must find the same.
            pytest.param(format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True), 300, id="tomorrow"),
            pytest.param(format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True), 5, id="yesterday"),
        ],
    )
    async def test_retry_after_is_followed_within_reason(
        self, receiver: Receiver, pauses: list[float], header: str, pause: float
    ) -> None:
        """Seconds with fractions or an HTTP date, at least the jitter, at most the cap (S1, J14)."""
        receiver.script.append(status(429, {"retry-after": header}))
        await send(WebhookSink(receiver.url(), retry=Retry(delays_s=(0, 5))), epoch())
        assert pauses == [pause]

    def test_an_http_date_is_seconds_from_now(self) -> None:
        header = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
        assert 85 < (retry_after_s(header) or 0) <= 90
        assert retry_after_s(None) is None

    async def test_no_attempt_begins_after_the_total(self, receiver: Receiver, pauses: list[float]) -> None:
        receiver.otherwise = status(500)
        with pytest.raises(WebhookError, match="in 2 attempts"):
            await send(WebhookSink(receiver.url(), retry=Retry(delays_s=(0, 1, 50, 1), total_s=40)), epoch())

    def test_jitter_is_full_and_leaves_the_seeds_of_a_training_alone(self) -> None:
        """Drawing from the global generator would make a seeded run depend on the network."""
        before = random.getstate()
        pauses = [Retry().pause_s(10, None) for _ in range(200)]
        assert random.getstate() == before
        assert 0 <= min(pauses) < 2 < 8 < max(pauses) <= 10

    @pytest.mark.parametrize(
        "fields", [{"delays_s": ()}, {"delays_s": (-1,)}, {"cap_s": float("inf")}, {"total_s": -1}]
    )
    def test_what_is_no_schedule_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"Retry (needs at least one delay|takes finite seconds)"):
            Retry(**fields)

    async def test_a_burst_against_a_throttling_server_loses_nothing(self, receiver: Receiver) -> None:
        """Every other request is answered 429 (S1, S4)."""
        for _ in range(30):
            receiver.script.extend([status(429, {"retry-after": "0.01"}), status(200)])
        await send(WebhookSink(receiver.url(), retry=Retry(delays_s=(0, 0.01, 0.01))), *(epoch(n) for n in range(30)))
        assert [body["data"]["epoch"] for body in receiver.bodies] == [n for n in range(30) for _ in "ab"]


class TestDeadLetters:
    async def test_they_can_be_sent_again_with_their_first_id(self, receiver: Receiver) -> None:
        """Also after the sink is closed; what fails again stays, with what is known now."""
        receiver.otherwise = status(500)
        sink = WebhookSink(receiver.url(), secret=SECRET, retry=QUICK)
        for number in range(3):
            with pytest.raises(WebhookError):
                await send(sink, epoch(number))
        letters = sink.dead_letters
        assert [(letter.event.seq, letter.attempts, letter.status) for letter in letters] == [
            (n, 3, 500) for n in (1, 2, 3)
        ]
        assert letters[0].reason == "it answered 500 Internal Server Error"
        receiver.requests.clear()
        receiver.script.extend([status(200), status(404)])
        receiver.otherwise = status(200)
        assert await sink.resend() == 2
        assert [request.headers["webhook-id"] for request in receiver.requests] == [letter.id for letter in letters]
        assert [(letter.event.seq, letter.attempts, letter.status) for letter in sink.dead_letters] == [(2, 4, 404)]
        assert await sink.resend() == 1
        assert sink.dead_letters == []

    async def test_they_are_bounded(self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sinks.webhook, "_MOST_DEAD_LETTERS", 3)
        receiver.otherwise = status(404)
        sink = WebhookSink(receiver.url())
        await sink.open()
        with pytest.raises(WebhookError):
            await sink.write([epoch(n) for n in range(5)])
        await sink.aclose()
        assert [letter.event.seq for letter in sink.dead_letters] == [3, 4, 5]
        assert len(receiver.requests) == 5

    @both
    async def test_closing_ends_a_wait_for_the_next_attempt(self, receiver: Receiver, anyio_backend: str) -> None:
        """The exit is not held up by a schedule of minutes, and the event can still be sent."""
        receiver.otherwise = status(503, {"retry-after": "300"})
        sink = WebhookSink(receiver.url())
        await sink.open()
        failed: list[Exception] = []

        async def write() -> None:
            try:
                await sink.write([epoch()])
            except WebhookError as error:
                failed.append(error)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write)
                while not receiver.requests:
                    await anyio.sleep(0.005)
                await sink.aclose()
        assert len(failed) == 1
        assert [letter.attempts for letter in sink.dead_letters] == [1]

    @both
    async def test_a_cancelled_delivery_is_kept(self, receiver: Receiver, anyio_backend: str) -> None:
        receiver.otherwise = hang
        sink = WebhookSink(receiver.url())
        await sink.open()
        with anyio.move_on_after(0.2):
            await sink.write([epoch(7)])
        assert [letter.reason for letter in sink.dead_letters] == ["it was interrupted before an answer came"]
        receiver.otherwise = status(200)
        assert await sink.resend() == 1
        await sink.write([epoch(8)])
        await sink.aclose()


class TestClient:
    async def test_a_given_client_is_used_and_left_open(self, receiver: Receiver) -> None:
        async with httpx.AsyncClient(headers={"authorization": "Bearer mine"}) as client:
            sink = WebhookSink(receiver.url(), client=client)
            await send(sink, epoch(0))
            await send(sink, epoch(1))
            assert not client.is_closed
            assert (await client.post(receiver.url(), content=b"{}")).status_code == 200
        assert {request.headers["authorization"] for request in receiver.requests} == {"Bearer mine"}

    def test_it_does_not_travel(self) -> None:
        sink = WebhookSink("https://example.com", client=httpx.AsyncClient())
        assert pickle.loads(pickle.dumps(sink))._given is None

    async def test_any_client_with_the_same_interface_will_do(self, receiver: Receiver) -> None:
        """Its errors are not httpx's: what is no transport error is final."""

        class Strange(httpx.AsyncClient):
            async def send(self, request: Any, **options: Any) -> Any:
                raise LookupError(f"no route to {request.url}")

        async with Strange() as client:
            sink = WebhookSink(receiver.url("/private"), client=client, retry=QUICK)
            with pytest.raises(WebhookError, match=r"in 1 attempt: LookupError no route to http://127\.0\.0\.1:\d+/…"):
                await send(sink, epoch())

    async def test_an_attempt_that_was_cut_off_costs_the_client_not_the_next_attempt(
        self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """httpx's pool can stay one connection short after a cancelled request: a new client is made."""
        made: list[httpx.AsyncClient] = []

        def make() -> Any:
            made.append(httpx.AsyncClient())
            return made[-1]

        monkeypatch.setattr(sinks.endpoint, "_make_client", make)
        monkeypatch.setattr(sinks.endpoint, "ATTEMPT_LIMIT_S", 0.1)
        receiver.script.extend([status(200), status(503), drip_headers, status(200)])
        await send(WebhookSink(receiver.url(), retry=QUICK), epoch(0), epoch(1), epoch(2))
        assert len(made) == 2
        assert all(client.is_closed for client in made)

    def test_what_is_no_client_is_refused(self) -> None:
        with httpx.Client() as client, pytest.raises(TypeError, match=r"must be an httpx\.AsyncClient or one like it"):
            WebhookSink("https://example.com", client=client)  # type: ignore[arg-type]  # what is tested

    async def test_the_proxy_of_the_environment_is_used(
        self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Clusters often allow no other way out."""
        for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", receiver.url())
        await send(WebhookSink("http://receiver.invalid/hook"), epoch())
        assert receiver.requests[0].line == "POST http://receiver.invalid/hook HTTP/1.1"

    async def test_a_client_that_cannot_be_made_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "ftp://user:pass-word@proxy.invalid")
        with pytest.raises(
            SinkUnavailable, match=r"WebhookSink\('https://example.com/…'\) cannot make its HTTP client"
        ) as it:
            await WebhookSink("https://example.com/secret-path").open()
        assert "pass-word" not in str(it.value)
        assert "secret-path" not in str(it.value)

    def test_importing_the_sinks_imports_neither_httpx_nor_torch(self) -> None:
        script = "import sinks, sys; sinks.WebhookSink('https://x'); print({'httpx', 'torch'} & set(sys.modules))"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert result.stdout == "set()\n"


class TestSecrets:
    """G16: of the URL only scheme, host and port may be seen, whatever happens, at every log level (S8)."""

    PARTS = (
        "us3r-name",
        "pa55-word",
        "T0KEN",
        "B0T-part",
        "qu3ry",
        "fragm3nt",
        "MDEyMzQ1",
        "dXMzci1uYW1lOnBhNTUtd29yZA",
    )
    REST = "/services/T0KEN/B0T-part%20x?key=qu3ry-value#fragm3nt"
    USER = "us3r-name:pa55-word@"
    SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"

    @pytest.fixture
    def log(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        caplog.set_level(logging.DEBUG)
        for name in ("httpx", "httpcore", "asyncio"):
            caplog.set_level(logging.DEBUG, name)
        return caplog

    @pytest.mark.parametrize(
        "answer",
        [
            *(status(200), status(404), status(410), status(503), garbage, reset, hang, drip_headers),
            status(302, {"location": "/services/T0KEN/next?key=qu3ry"}),
            status(302, {"location": "http://127.0.0.1:9/services/T0KEN?key=qu3ry"}),
            status(200, {"x-echo": "/services/T0KEN/B0T-part%20x?key=qu3ry-value", "x-user": "us3r-name"}),
            None,
        ],
    )
    async def test_nothing_of_them_is_in_a_log_an_error_or_a_repr(
        self,
        receiver: Receiver,
        log: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        answer: Answer | None,
    ) -> None:
        monkeypatch.setattr(sinks.endpoint, "_TIMEOUTS_S", (1.0, 0.1, 1.0, 1.0))
        monkeypatch.setattr(sinks.endpoint, "ATTEMPT_LIMIT_S", 0.2)
        asyncio.get_running_loop().set_debug(True)
        if answer is None:
            receiver.stop()
        else:
            receiver.otherwise = answer
        sink = WebhookSink(receiver.url(self.REST, self.USER), secret=self.SECRET, retry=Retry(delays_s=(0, 0)))
        seen = [repr(sink), str(sink.options), str(sink.hooks)]
        try:
            await send(sink, epoch())
        except EventBusError as error:
            seen += [repr(error), repr(error.__cause__), *traceback.format_exception(error)]
        seen += [repr(sink.dead_letters), log.text]
        assert "httpcore" in log.text or "httpx" in log.text
        for part in self.PARTS:
            assert part not in "\n".join(seen)
        if answer is not None and answer is not hang:
            assert receiver.requests[0].line.split()[1] == "/services/T0KEN/B0T-part%20x?key=qu3ry-value"
            assert receiver.requests[0].headers["authorization"].startswith("Basic ")

    async def test_what_others_log_through_httpx_is_left_alone(
        self, receiver: Receiver, log: pytest.LogCaptureFixture
    ) -> None:
        """Beside us and after us, their URLs are in their log as ever."""
        sink = WebhookSink(receiver.url("/services/T0KEN"))
        await sink.open()
        async with httpx.AsyncClient() as client, anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(client.get, receiver.url(f"/services/T0KEN/theirs/{number}"))
                tasks.start_soon(client.get, receiver.url(f"/services/T0KEN/theirs/{number}"))
                await sink.write([epoch(number)])
        await sink.aclose()
        theirs = [
            record
            for record in log.records
            if record.name == "httpx" and "/services/T0KEN/theirs/" in record.getMessage()
        ]
        ours = [record for record in log.records if record.name == "httpx" and "/…" in record.getMessage()]
        assert (len(theirs), len(ours)) == (10, 5)
        assert ours[0].getMessage() == f'HTTP Request: POST http://127.0.0.1:{receiver.port}/… "HTTP/1.1 200 Whatever"'

    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("ftp://us3r-name:pa55-word@host/T0KEN", "it does not begin with http:// or https://"),
            ("hooks.example.com/T0KEN", "it does not begin with http:// or https://"),
            ("https:///T0KEN", "it names no host that can exist"),
            ("https://us3r-name:pa55-word@/T0KEN", "it names no host that can exist"),
            ("https://exa mple.com/T0KEN", "it holds white space or control characters"),
            ("https://example.com/T0KEN\n", "it holds white space or control characters"),
            ("https://us3r-name:pa55-word@host:99999/T0KEN", "its host or port is malformed"),
            ("https://us3r-name:pa55-word@host:port/T0KEN", "its host or port is malformed"),
            ("https://us3r-name:pa55-word@[::1/T0KEN", "its host or port is malformed"),
            ("https://us3r-name:pa55-word@ho\u2100st/T0KEN", "its host or port is malformed"),
            ("https://host:0/T0KEN", "its port is 0"),
            ("https://a..b/T0KEN", "it names no host that can exist"),
            (b"https://host/T0KEN", "must be a string, not bytes"),
        ],
    )
    def test_a_malformed_url_is_an_error_at_construction_that_does_not_show_it(self, url: Any, problem: str) -> None:
        with pytest.raises(ValueError, match=re.escape(problem)) as raised:
            WebhookSink(url)
        text = "".join(traceback.format_exception(raised.value))
        assert not [part for part in self.PARTS if part in text.replace(repr(url), "")]

    @pytest.mark.parametrize(
        ("secret", "problem"), [("whsec_T0KEN!", "is not base64"), ("", "is empty"), ("whsec_", "is empty")]
    )
    def test_a_malformed_secret_is_an_error_at_construction_that_does_not_show_it(
        self, secret: str, problem: str
    ) -> None:
        with pytest.raises(ValueError, match=problem) as raised:
            WebhookSink("https://example.com", secret=secret)
        assert "T0KEN" not in str(raised.value)

    def test_an_unknown_format_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="There is no webhook format 'slack'"):
            WebhookSink("https://example.com", format="slack")  # type: ignore[arg-type]  # what is tested

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("https://u:p@Example.com:8443/x?y#z", "WebhookSink('https://example.com:8443/…')"),
            ("http://[::1]:80/x", "WebhookSink('http://[::1]:80/…')"),
            ("https://bücher.example/x", "WebhookSink('https://bücher.example/…')"),
        ],
    )
    def test_its_repr_is_what_may_be_shown(self, url: str, shown: str) -> None:
        assert repr(WebhookSink(url)) == shown


async def test_no_connection_is_left_behind(receiver: Receiver) -> None:
    """After `aclose` the server sees every connection closed."""
    await send(WebhookSink(receiver.url()), epoch())
    with anyio.fail_after(5):
        while receiver.serving:
            await anyio.sleep(0.005)
    assert receiver.connections == 1
