"""Keys in texts of others: providers and proxies quote what they were sent."""

import os
import re
from collections.abc import Iterable

_VARIABLE = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$")
#: A shorter value would also be found where it means something else.
_SHORTEST = 6


def without_secrets(text: str, keys: Iterable[str | None] = ()) -> str:
    """A text without these keys, and without those in variables of this process (`OPENAI_API_KEY`, …)."""
    known = [*keys, *(value for name, value in os.environ.items() if _VARIABLE.search(name))]
    for key in sorted({key for key in known if key and len(key) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(key, "***")
    return text
