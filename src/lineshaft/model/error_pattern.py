"""Patterns that group errors of one cause.

Ten thousand dead letters of one cause read "timeout after 31 s on task_01J8…", each with different numbers. A
person decides about the cause once. `error_pattern` replaces URLs, paths, ids and numbers by placeholders, so
that all of these errors have the same pattern.
"""

import re

MAX_PATTERN = 300
#: The start of an error identifies it; reading more costs time and splits groups.
_MAX_READ = 2_000
_TRACEBACK = "Traceback (most recent call last)"

# Applied in this order. Each is linear: no repetition is nested.
_PLACEHOLDERS = (
    (re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s'\"<>)\]}]+", re.IGNORECASE), "<url>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    # Prefixed ids such as task_01J8…: a word, an underscore or a hyphen, and letters mixed with digits.
    (re.compile(r"\b[a-z]{2,20}[_-](?=[a-z]{0,40}[0-9])[0-9a-z]{10,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9:.,]+(?:Z|[+-][0-9:]+)?)?"), "<time>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"(?<![\w<])(?:[A-Za-z]:)?(?:[\\/][\w.@%+~-]+){2,}[\\/]?"), "<path>"),
    (re.compile(r"\b(?=[a-f]{0,64}[0-9])[0-9a-f]{8,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"[-+]?[0-9]+(?:[.,:][0-9]+)*"), "<n>"),
)


def error_pattern(error: str) -> str:
    """The pattern of an error; never empty, never longer than MAX_PATTERN."""
    text = _cause(error)
    for variable, placeholder in _PLACEHOLDERS:
        text = variable.sub(placeholder, text)
    text = " ".join(text.split())
    return text[:MAX_PATTERN].rstrip() or "no message"


def _cause(error: str) -> str:
    """The part that names the cause: of a Python traceback, the last line."""
    text = error.strip()
    if text.startswith(_TRACEBACK):
        text = text.rsplit("\n", 1)[-1].strip()
    return text[:_MAX_READ]
