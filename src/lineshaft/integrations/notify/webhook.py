"""Webhooks signed according to Standard Webhooks, so that receivers can verify them with a library.

The signature is HMAC-SHA256 over `id.timestamp.body`, which prevents forged, modified and replayed messages.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from lineshaft.http_client import NoResponseError, post
from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import Notification

_PREFIX = "whsec_"
_SUCCESS = range(200, 300)


@dataclass(frozen=True, slots=True)
class Webhook:
    url: str = field(repr=False)
    key: bytes = field(repr=False)
    #: For receivers that need more than the signature.
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_sec: float = 10.0
    clock: Callable[[], float] = time.time

    async def send(self, message: Notification) -> None:
        body = msgspec.json.encode(message)
        sent_at = int(self.clock())
        headers = {
            **self.headers,
            "content-type": "application/json",
            "user-agent": "lineshaft",
            "webhook-id": message.id,
            "webhook-timestamp": str(sent_at),
            "webhook-signature": f"v1,{signature(self.key, message.id, sent_at, body)}",
        }
        try:
            response = await post(self.url, body, headers=headers, timeout_sec=self.timeout_sec, max_body=0)
        except NoResponseError as error:
            raise DeliveryError(str(error)) from None
        if response.status not in _SUCCESS:
            raise DeliveryError(f"the receiver responded with HTTP {response.status}")


def signature(key: bytes, message_id: str, sent_at: int, body: bytes) -> str:
    signed = f"{message_id}.{sent_at}.".encode() + body
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def key_of(secret: str) -> bytes:
    """The key of a secret: `whsec_` and base 64, as in Standard Webhooks, or any other text."""
    if secret.startswith(_PREFIX):
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    return secret.encode()
