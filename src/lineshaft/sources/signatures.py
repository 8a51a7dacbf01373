"""Signatures of webhooks, checked in constant time on the bytes as they came, before anything is parsed."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Mapping

from lineshaft.types.sources import Verification

#: A signed time stamp may differ from our clock by so much.
TOLERANCE_SEC = 300
#: Where senders put the signature of hmac-sha256, unless the source names a header.
HMAC_HEADERS = ("x-signature-256", "x-hub-signature-256", "x-signature", "x-webhook-signature")
#: Where senders put a token, unless the source names a header; also in `Authorization: Bearer`.
TOKEN_HEADERS = ("x-webhook-token", "x-token")
_STANDARD_PREFIX = "whsec_"


class SignatureError(Exception):
    """A delivery that isn't authentic. The text has no secret and nothing of the body."""


def verify(how: Verification, secret: str, headers: Mapping[str, str], body: bytes, now: float) -> None:
    """Raise SignatureError unless the delivery is authentic. Names of headers are in lower case."""
    if how.scheme == "none":
        return
    if not secret:
        raise SignatureError("the secret is empty")
    _SCHEMES[how.scheme](how, secret, headers, body, now)


def _github(_: Verification, secret: str, headers: Mapping[str, str], body: bytes, _now: float) -> None:
    given = _required(headers, "x-hub-signature-256")
    _check_hex(given, "sha256=", _digest(secret.encode(), body))


def _gitlab(_: Verification, secret: str, headers: Mapping[str, str], _body: bytes, _now: float) -> None:
    _check_token(_required(headers, "x-gitlab-token"), secret)


def _slack(_: Verification, secret: str, headers: Mapping[str, str], body: bytes, now: float) -> None:
    given = _required(headers, "x-slack-signature")
    time = _fresh(_required(headers, "x-slack-request-timestamp"), now)
    _check_hex(given, "v0=", _digest(secret.encode(), b"v0:" + time + b":" + body))


def _standard(_: Verification, secret: str, headers: Mapping[str, str], body: bytes, now: float) -> None:
    message = _required(headers, "webhook-id")
    time = _fresh(_required(headers, "webhook-timestamp"), now)
    signatures = _required(headers, "webhook-signature").split()
    try:
        key = base64.b64decode(secret.removeprefix(_STANDARD_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise SignatureError("the secret is not base 64, with or without whsec_") from None
    signed = b".".join((message.encode("latin-1", "replace"), time, body))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())
    # All of them, so that the time doesn't depend on which one matches.
    matches = [
        hmac.compare_digest(given.removeprefix("v1,").encode("latin-1", "replace"), expected)
        for given in signatures[:20]
        if given.startswith("v1,")
    ]
    if not any(matches):
        raise SignatureError("the signature doesn't match")


def _hmac(how: Verification, secret: str, headers: Mapping[str, str], body: bytes, _now: float) -> None:
    names = (how.header.lower(),) if how.header else HMAC_HEADERS
    given = next((headers[name] for name in names if name in headers), None)
    if given is None:
        raise SignatureError(f"the header {names[0]} is missing")
    prefix = "sha256=" if given.startswith("sha256=") else ""
    _check_hex(given, prefix, _digest(secret.encode(), body))


def _token(how: Verification, secret: str, headers: Mapping[str, str], _body: bytes, _now: float) -> None:
    names = (how.header.lower(),) if how.header else TOKEN_HEADERS
    given = next((headers[name] for name in names if name in headers), None)
    if given is None and how.header is None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else None
    if given is None:
        raise SignatureError(f"the header {names[0]} is missing")
    _check_token(given, secret)


_SCHEMES: Mapping[str, Callable[[Verification, str, Mapping[str, str], bytes, float], None]] = {
    "github": _github,
    "gitlab": _gitlab,
    "slack": _slack,
    "standard": _standard,
    "hmac-sha256": _hmac,
    "token": _token,
}


def _required(headers: Mapping[str, str], name: str) -> str:
    if name not in headers:
        raise SignatureError(f"the header {name} is missing")
    return headers[name]


def _digest(key: bytes, message: bytes) -> str:
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def _check_hex(given: str, prefix: str, expected: str) -> None:
    wanted = (prefix + expected).encode()
    if not hmac.compare_digest(given.strip().encode("latin-1", "replace"), wanted):
        raise SignatureError("the signature doesn't match")


def _check_token(given: str, secret: str) -> None:
    # Digests are compared, so that the time doesn't depend on the length either.
    digests = [hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (given, secret)]
    if not hmac.compare_digest(*digests):
        raise SignatureError("the token doesn't match")


def _fresh(given: str, now: float) -> bytes:
    """The time stamp as it was signed, if it is of now."""
    if not given.isascii() or not given.isdigit() or len(given) > 12:  # noqa: PLR2004 - seconds since 1970
        raise SignatureError("the time stamp is not a number of seconds")
    if abs(now - int(given)) > TOLERANCE_SEC:
        raise SignatureError(f"the time stamp is more than {TOLERANCE_SEC} s from now")
    return given.encode()
