"""Standard Webhooks 1.0.0: what is sent for an event, and how it is signed (standardwebhooks.com)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from eventbus.events import Event, PretrainRoutineStart

__all__ = ["Message", "signing_key"]

_PREFIX = "whsec_"


@dataclass(frozen=True, slots=True)
class Message:
    """The body that is sent for one event, and its id; both are the same at every attempt."""

    id: str
    body: bytes

    @classmethod
    def of(cls, event: Event, line: bytes) -> Message:
        """Build the message of `event`, whose JSON form is `line`."""
        if event.hook == PretrainRoutineStart.hook:  # a configuration is nobody's business but the user's
            record = msgspec.json.decode(line)
            record.pop("config", None)
            line = msgspec.json.encode(record)
        kind, moment = (msgspec.json.encode(text) for text in (event.hook, _iso(event.time)))
        return cls(_id(event), b'{"type":%b,"timestamp":%b,"data":%b}' % (kind, moment, line))

    def headers(self, key: bytes | None, now: int) -> dict[str, str]:
        """Return the headers of an attempt at `now` (Unix seconds), signed if there is a `key`."""
        headers = {"content-type": "application/json", "webhook-id": self.id, "webhook-timestamp": str(now)}
        if key is not None:
            signed = hmac.digest(key, b"%b.%d.%b" % (self.id.encode(), now, self.body), hashlib.sha256)
            headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
        return headers


def _id(event: Event) -> str:
    """The same for the same event, also in a later process; the time tells two runs of one name apart."""
    names = (event.run, event.rank, event.attempt, event.seq, event.hook, event.time)
    return "msg_" + hashlib.sha256(repr(names).encode()).hexdigest()[:32]


def _iso(seconds: float) -> str:
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OSError, OverflowError, ValueError):  # an event whose time is none
        moment = datetime.fromtimestamp(0, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def signing_key(secret: str | bytes | None) -> bytes | None:
    """Return the key of a ``whsec_`` secret (base64 after the prefix), or of any other as it stands."""
    if secret is None:
        return None
    if isinstance(secret, bytes):
        key = secret
    elif secret.startswith(_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            key = None
        if key is None:
            raise ValueError("The webhook's secret begins with whsec_, but what follows is not base64.")
    else:
        key = secret.encode()
    if not key:
        raise ValueError("The webhook's secret is empty. Leave secret out to send unsigned.")
    return key
