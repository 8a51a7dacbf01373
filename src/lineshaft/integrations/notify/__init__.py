"""Destinations of notifications: webhooks, commands, services that apprise reaches, the review log.

A sender has one method, which sends a message or raises DeliveryError. It has no state and never repeats a
delivery: the outbox does (engine/feed/outbox.py). URLs contain secrets: no error, log line or repr contains
one.
"""

from typing import Protocol

from msgspec import Struct

from lineshaft.engine.feed.outbox import Throttle
from lineshaft.model.notices import NoticeKind, Notification


class DeliveryError(Exception):
    """A message was not delivered. The text gives the cause, without the URL."""


class Sender(Protocol):
    async def send(self, message: Notification) -> None:
        """Deliver it, or raise DeliveryError."""
        ...


class Destination(Struct, frozen=True):
    name: str
    sender: Sender
    kinds: frozenset[NoticeKind]
    throttle: Throttle
    #: Only notices about work of these sources; none: all notices.
    sources: frozenset[str] = frozenset()
