"""Slack, e-mail and other services that apprise can reach. An extra: `pip install 'lineshaft[notify]'`."""

import logging
from importlib import import_module
from typing import Any

from lineshaft.errors import SettingsError
from lineshaft.integrations.notify import DeliveryError
from lineshaft.model.notices import Message, NoticeKind

_FAILURES = frozenset(
    {NoticeKind.DEAD_LETTER, NoticeKind.POISON_PILL, NoticeKind.DAG_FAILED, NoticeKind.SINGLE_DAG_FAILED}
)


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

    async def send(self, message: Message) -> None:
        kind = "failure" if message.kind in _FAILURES else "warning"
        if not await self._recipients.async_notify(title=message.title, body=message.text, notify_type=kind):
            raise DeliveryError("apprise could not deliver the message")
