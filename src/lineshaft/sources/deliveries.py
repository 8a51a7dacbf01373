"""Deliveries of webhooks: the event for the template, and the keys by which a repeated one is recognised."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.types.sources import Verification

MAX_BODY_BYTES = 1 << 20
MAX_FORM_FIELDS = 1_000
#: Keys made of a body's digest last for so long: a sender may well send the same body again another day.
DIGEST_SEC = 86_400.0
#: Ids: longer than any sender repeats a delivery.
ID_SEC = 30 * 86_400.0
_MAX_ID = 200
#: Headers with secrets, which a template must not see.
_SECRET_HEADER = re.compile(r"auth|cookie|token|secret|signature|key|password", re.IGNORECASE)
_IDS: Mapping[str, tuple[str, ...]] = {
    "github": ("x-github-delivery",),
    "gitlab": ("idempotency-key", "x-gitlab-event-uuid"),
    "slack": (),
    "standard": ("webhook-id",),
}
_OTHER_IDS = ("webhook-id", "x-delivery-id", "idempotency-key")


class Delivery(Struct, frozen=True):
    #: The body, with `body` and `headers`.
    event: dict[str, Any]
    #: Texts, with how many seconds each counts.
    keys: list[tuple[str, float]]
    #: The response to a delivery that only tests the connection.
    challenge: str | None = None
    is_ping: bool = False
    #: A person has typed it and waits for an answer.
    is_command: bool = False


def read(
    how: Verification, headers: Mapping[str, str], body: bytes, *, replay_window_sec: float = 0.0
) -> Delivery:
    """Parse an authentic delivery; raises InvalidInputError. Names of headers are in lower case.

    Within `replay_window_sec` a known body is a repeated delivery, also with another id.
    """
    payload = _payload(headers.get("content-type", ""), body)
    fields = payload if isinstance(payload, dict) else {}
    if how.scheme == "slack":
        # A shared secret of older apps.
        fields.pop("token", None)
        if fields.get("type") == "url_verification":
            return Delivery({}, [], challenge=str(fields.get("challenge", "")))
    shown = {name: value for name, value in headers.items() if not _SECRET_HEADER.search(name)}
    event = {**fields, "body": payload, "headers": shown}
    ping = how.scheme == "github" and headers.get("x-github-event") == "ping"
    command = how.scheme == "slack" and isinstance(fields.get("command"), str)
    keys = _keys(how.scheme, headers, fields, body, replay_window_sec)
    return Delivery(event, keys, is_ping=ping, is_command=command)


def _payload(content_type: str, body: bytes) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        return _form(body)
    if not body:
        return {}
    if kind.startswith("text/plain"):
        return body.decode("utf-8", "replace")
    return _json(body)


def _form(body: bytes) -> Any:
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    except ValueError:
        raise InvalidInputError(errors=[("body", "not a valid form")]) from None
    fields = dict(pairs)
    # Some senders put JSON into one field of a form.
    return _json(fields["payload"].encode()) if list(fields) == ["payload"] else fields


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInputError(errors=[("body", "not valid JSON")]) from None


def _keys(
    scheme: str, headers: Mapping[str, str], fields: Mapping[str, Any], body: bytes, replay_window_sec: float
) -> list[tuple[str, float]]:
    digest = f"body:{hashlib.sha256(body).hexdigest()}"
    delivery_id = next((headers[name] for name in _IDS.get(scheme, _OTHER_IDS) if headers.get(name)), None)
    if scheme == "slack":
        delivery_id = next((fields[name] for name in ("event_id", "trigger_id") if fields.get(name)), None)
    if not isinstance(delivery_id, str) or not delivery_id.isprintable():
        return [(digest, max(DIGEST_SEC, replay_window_sec))]
    if len(delivery_id) > _MAX_ID:
        delivery_id = hashlib.sha256(delivery_id.encode()).hexdigest()
    keys = [(f"delivery:{delivery_id}", ID_SEC)]
    # Senders such as GitHub don't sign the id, so only the body shows that a captured delivery is replayed.
    return [*keys, (digest, replay_window_sec)] if replay_window_sec else keys
