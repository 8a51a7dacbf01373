"""What buttons need besides their form: the command line that does the same, and names for the document."""

import hashlib
import shlex
from urllib.parse import quote

from lineshaft.model.printable import printable

_LONGEST = 400


def command_line(*words: str) -> str | None:
    """A command of `lineshaft`; None: too long to be read, or to be typed as it is shown."""
    line = shlex.join(["lineshaft", *words])
    return line if len(line) <= _LONGEST and printable(line) == line else None


def element_id(text: str) -> str:
    """The same for the same text, and safe in a document whatever the text is."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def segment(text: str) -> str:
    """A name as one part of an address: its slashes don't separate."""
    return quote(text, safe="")
