"""Hides values whose keys look secret, and credentials and queries in URLs, before any subscriber sees them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from eventbus.device import Deferred
from eventbus.frozen import FrozenDict, plain_key

__all__ = ["HIDDEN", "SECRET_KEYS", "Redaction", "hide_credentials"]

#: What a hidden value is replaced by.
HIDDEN = "[redacted]"
#: The default of ``EventBus(redact=…)``: parts of key names, as regular expressions, letter case ignored.
SECRET_KEYS = (
    r"token(?!i[sz])",  # not tokenizer
    r"secret",
    r"passw",
    r"passphrase",
    r"api[_-]?key",
    r"access[_-]?key",
    r"private[_-]?key",
    r"credential",
    r"authorization",
    r"webhook",
)
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"(://[^?#\s]*\?)[^#\s'\"<>)]+")
_KNOWN_KEYS = 10_000


def hide_credentials(text: str) -> str:
    """The text with the user, the password and the query of each URL in it hidden."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO.sub(f"{HIDDEN}@", text))


class Redaction:
    """The key patterns of one bus. Numbers stay visible (``num_tokens``): a secret is a text or a container."""

    __slots__ = ("_secret", "harmless")

    def __init__(self, patterns: Iterable[str]) -> None:
        joined = "|".join(map(_checked, patterns))
        self._secret = re.compile(joined, re.IGNORECASE) if joined else None
        #: Keys already looked at, so that a batch event costs one set comparison.
        self.harmless: set[str] = set()

    def is_secret(self, key: object) -> bool:
        return self._secret is not None and self._secret.search(str(key)) is not None

    def container(self, value: Any) -> Any:
        """Any frozen value with its secrets hidden."""
        if isinstance(value, str):
            return hide_credentials(value)
        if isinstance(value, Mapping):
            return FrozenDict({plain_key(key): self._item(key, item) for key, item in value.items()})
        if isinstance(value, tuple):
            return tuple(self.container(item) for item in value)
        return value

    def hide(self, value: Any) -> Any:
        """The value of a field whose own name looks secret."""
        if isinstance(value, float | int | Deferred | None):
            return value
        if isinstance(value, Mapping):
            return FrozenDict({key: self.hide(item) for key, item in value.items()})
        return tuple(self.hide(item) for item in value) if isinstance(value, tuple) else HIDDEN

    def _item(self, key: Any, item: Any) -> Any:
        secret = self.is_secret(key)
        if isinstance(item, float | int | Deferred | None):
            if not secret and isinstance(key, str) and len(self.harmless) < _KNOWN_KEYS:
                self.harmless.add(key)
            return item
        return HIDDEN if secret else self.container(item)


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"redact holds {pattern!r}, which is no regular expression: {error}.") from None
    return pattern
