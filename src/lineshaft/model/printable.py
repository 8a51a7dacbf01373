"""Text that is safe to print: a terminal acts on control characters, and some others reorder a line."""

import re

#: Control characters except tab and newline, changes of the direction of text, and line separators.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with unsafe characters escaped as JSON does it."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
