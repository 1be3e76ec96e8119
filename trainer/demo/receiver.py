"""A webhook receiver on loopback, as slow and unreliable as real ones, that checks what it gets."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = ["Received", "SlowReceiver"]

_FAILS_EVERY = 5
_TOLERANCE_S = 300


@dataclass(frozen=True)
class Received:
    """One request as it came: its id, whether its signature holds, and whether it was answered with success."""

    id: str
    is_signed: bool
    was_taken: bool


class SlowReceiver:
    """Takes `delay_s` for each request and answers every fifth with 503; a context manager around its thread."""

    def __init__(self, *, delay_s: float, secret: str) -> None:
        self.delay_s = delay_s
        self.requests: list[Received] = []
        self._key = base64.b64decode(secret.removeprefix("whsec_"))
        self._lock = threading.Lock()
        self._count = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Read, wait, check, and answer one request."""
        body = request.rfile.read(int(request.headers["content-length"]))
        time.sleep(self.delay_s)
        identity = request.headers.get("webhook-id", "")
        if identity != "inline":  # the comparison with a plain callback signs nothing
            with self._lock:
                self._count += 1
                taken = self._count % _FAILS_EVERY != 0
                self.requests.append(Received(identity, self._is_signed(request, identity, body), taken))
        else:
            taken = True
        request.send_response(204 if taken else 503)
        request.send_header("content-length", "0")
        request.end_headers()

    def _is_signed(self, request: BaseHTTPRequestHandler, identity: str, body: bytes) -> bool:
        """Standard Webhooks 1.0.0: HMAC-SHA256 over id, timestamp of the attempt, and the body as it came."""
        stamp = request.headers.get("webhook-timestamp", "")
        digest = hmac.new(self._key, f"{identity}.{stamp}.".encode() + body, hashlib.sha256).digest()
        wanted = "v1," + base64.b64encode(digest).decode()
        given = request.headers.get("webhook-signature", "").split()
        is_fresh = stamp.isdigit() and abs(time.time() - int(stamp)) < _TOLERANCE_S
        return is_fresh and any(hmac.compare_digest(wanted, one) for one in given)
