"""Slack, e-mail and other services that apprise can reach. An extra: `pip install 'lineshaft[notify]'`."""

import logging
from importlib import import_module
from typing import Any

from lineshaft.errors import SettingsError
from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import NoticeKind, Notification

_TYPES = {
    NoticeKind.DEAD_LETTER: "failure",
    NoticeKind.POISON_PILL: "failure",
    NoticeKind.DAG_FAILED: "failure",
    NoticeKind.SINGLE_DAG_FAILED: "failure",
    NoticeKind.TASK_COMPLETED: "success",
    NoticeKind.DAG_COMPLETED: "success",
}


class Apprise:
    def __init__(self, name: str, url: str) -> None:
        try:
            library: Any = import_module("apprise")
        except ImportError:
            raise SettingsError(
                f"Destination {name!r} needs apprise: pip install 'lineshaft[notify]'."
            ) from None
        # Both libraries log URLs, which contain secrets.
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._recipients = library.Apprise()
        if not self._recipients.add(url):
            raise SettingsError(f"Destination {name!r} has a URL that apprise doesn't support.")

    async def send(self, message: Notification) -> None:
        kind = _TYPES.get(message.kind, "warning")
        if not await self._recipients.async_notify(title=message.title, body=message.text, notify_type=kind):
            raise DeliveryError("apprise could not deliver the message")
