"""A webhook receiver on loopback: a plain socket server that answers by script, well or badly."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request as it came, and when its connection was made."""

    line: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[["Receiver", socket.socket], None]


def status(code: int, headers: dict[str, str] | None = None, body: bytes = b"ok") -> Answer:
    """Answer properly and keep the connection."""
    fields = {"content-length": str(len(body)), **(headers or {})}
    head = f"HTTP/1.1 {code} Whatever\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return lambda receiver, connection: connection.sendall(head.encode() + b"\r\n" + body)


def garbage(receiver: Receiver, connection: socket.socket) -> None:
    """Answer what is no HTTP."""
    connection.sendall(b"\x00\xffI am a mail server\r\n\r\n")
    connection.close()


def reset(receiver: Receiver, connection: socket.socket) -> None:
    """Break the connection off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    raise ConnectionResetError  # ends the reading too, which holds the socket open


def hang(receiver: Receiver, connection: socket.socket) -> None:
    """Take the request and never answer."""
    receiver.closing.wait()


def drip_headers(receiver: Receiver, connection: socket.socket) -> None:
    """Send one byte of header after the other without end."""
    _drip(receiver, connection, b"HTTP/1.1 200 OK\r\nx-drip: ")


def drip_body(receiver: Receiver, connection: socket.socket) -> None:
    """Send the head at once and a short body byte by byte without end."""
    _drip(receiver, connection, b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n")


def endless_body(receiver: Receiver, connection: socket.socket) -> None:
    """Send as much body as the other side takes."""
    with suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not receiver.closing.is_set():
            connection.sendall(b"x" * 65536)
            receiver.bytes_sent += 65536


def slow(seconds: float, answer: Answer | None = None) -> Answer:
    """Answer after a while."""

    def later(receiver: Receiver, connection: socket.socket) -> None:
        if not receiver.closing.wait(seconds):
            (answer or status(200))(receiver, connection)

    return later


def _drip(receiver: Receiver, connection: socket.socket, head: bytes) -> None:
    with suppress(OSError):
        connection.sendall(head)
        while not receiver.closing.wait(0.02):
            connection.sendall(b"x")


@dataclass
class Receiver:
    """Listens from `start` to `stop`; `script` holds the next answers, `otherwise` all after them."""

    otherwise: Answer = field(default_factory=lambda: status(200))
    script: deque[Answer] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    connections: int = 0
    serving: int = 0
    bytes_sent: int = 0
    port: int = 0

    def start(self) -> Receiver:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self.closing.clear()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def stop(self) -> None:
        self.closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for connection in self._open:
            connection.close()

    @property
    def bodies(self) -> list[Any]:
        return [request.json for request in self.requests]

    def url(self, rest: str = "/", userinfo: str = "") -> str:
        return f"http://{userinfo}127.0.0.1:{self.port}{rest}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        self.serving += 1
        try:
            self._answer(connection, number)
        finally:
            connection.close()
            self.serving -= 1

    def _answer(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError, ValueError), connection.makefile("rb") as stream:
            while line := stream.readline().decode("latin-1").strip():
                headers = {}
                while field := stream.readline().decode("latin-1").strip():
                    name, _, value = field.partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", 0)))
                self.requests.append(Request(line, headers, body, number))
                answer = self.script.popleft() if self.script else self.otherwise
                answer(self, connection)
