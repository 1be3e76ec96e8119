"""Keeps the secret parts of a URL out of the log: for many receivers, the URL is the credential.

httpx logs every URL at INFO and httpcore every header of the answer at DEBUG. `Redactor` is a filter on their
loggers that rewrites the records of our own requests, told by a context variable, and leaves everybody else's alone.
"""

from __future__ import annotations

import base64
import logging
import re
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Redactor", "parse_url"]

_HIDDEN = "[hidden]"
_SHORTEST = 3  # a shorter part is no secret, and hiding it everywhere would spoil the text
_LOGGERS = (
    *("httpx", "httpcore", "httpcore.connection", "httpcore.http11", "httpcore.http2", "httpcore.proxy"),
    *("httpx2", "httpcore2", "httpcore2.connection", "httpcore2.http11", "httpcore2.http2", "httpcore2.proxy"),
    *("httpcore.socks", "httpcore2.socks", "hpack.hpack", "hpack.table"),
)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://(?:[^\s/?#'\"@]*@)?([^\s/?#'\"]*)[^\s'\"]*", re.IGNORECASE)
_LOCATION = re.compile(r"(b'location', b)(?:'[^']*'|\"[^\"]*\")", re.IGNORECASE)

_current: ContextVar[Redactor | None] = ContextVar("trainbus_redactor", default=None)


def parse_url(url: str) -> SplitResult:
    """Split an absolute http(s) URL; raise ValueError saying what is wrong with it, without its secret parts."""
    if not isinstance(url, str):
        raise ValueError(f"A webhook's URL must be a string, not {type(url).__name__}.")
    problem = None
    try:
        parts = urlsplit(url)
        problem = _problem(url, parts)
    except ValueError:  # its message may quote the credentials
        problem = "its host or port is malformed"
    if problem is not None:
        raise ValueError(f"The webhook's URL cannot be used: {problem}. It is not shown, since it may be a secret.")
    return parts


def _problem(url: str, parts: SplitResult) -> str | None:
    if re.search(r"[\x00-\x20\x7f]", url):
        return "it holds white space or control characters"
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if not parts.hostname or not _is_host(parts.hostname):
        return "it names no host that can exist"
    if parts.port == 0:
        return "its port is 0"
    return None


def _is_host(host: str) -> bool:
    try:
        return bool(re.fullmatch(r"[\w.:%-]+", host)) and bool(host.encode("idna"))
    except UnicodeError:
        return False


class Redactor:
    """Hides everything of `url` but its scheme, host and port, and `secret`, in texts and in log records."""

    def __init__(self, url: str, secret: str | None = None) -> None:
        parts = parse_url(url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        #: What may be shown of the URL.
        self.origin = f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port is not None else "")
        self._hidden = sorted(_secret_parts(url, parts, secret), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` without a secret part of this URL, and with any other URL cut down to its host."""
        text = _LOCATION.sub(rf"\1'{_HIDDEN}'", _URL.sub(r"\1://\2/…", text))
        for part in self._hidden:
            text = text.replace(part, _HIDDEN)
        return text

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Redact what the HTTP client logs inside, in this task."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_filter)  # once: a filter that is there is not added again
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


class _Filter(logging.Filter):
    """Rewrites a record that comes from inside `Redactor.watching`. It is never removed: another thread may be
    walking the logger's filters, and would miss the next one."""

    def filter(self, record: logging.LogRecord) -> bool:
        redactor = _current.get()
        if redactor is not None:
            record.msg = redactor.text(record.getMessage())
            record.args = None
        return True


_filter = _Filter()


def _secret_parts(url: str, parts: SplitResult, secret: str | None) -> set[str]:
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    pieces = [*re.split(r"[/?&=;#]", f"{target}#{parts.fragment}"), parts.username or "", parts.password or ""]
    whole = [url, target, parts.query, secret or "", base64.b64encode(f"{user}:{password}".encode()).decode()]
    found = [*pieces, *whole]
    found += [unquote(part) for part in found] + [quote(unquote(part), safe="/?&=") for part in found]
    return {part for part in found if len(part) >= _SHORTEST}
