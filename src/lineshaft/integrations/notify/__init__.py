"""Where notifications go: a webhook, a command, whatever apprise can reach, the log of reviews.

A sender has one method, which sends one message or says why it could not. It keeps nothing and tries nothing
twice: the outbox does (store/outbox.py). Addresses hold secrets: none is in an error, a log line or a repr.
"""

from dataclasses import dataclass
from typing import Protocol

from lineshaft.engine.feed.outbox import Throttle
from lineshaft.model.notices import Message, NoticeKind


class DeliveryError(Exception):
    """It was not delivered. The text says why, without the address."""


class Sender(Protocol):
    async def send(self, message: Message) -> None:
        """Deliver it, or raise DeliveryError."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    name: str
    sender: Sender
    kinds: frozenset[NoticeKind]
    throttle: Throttle
