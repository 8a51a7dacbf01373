"""Which errors are alike: the same text once everything that differs from one time to the next is left out.

Ten thousand dead letters of one cause read "timeout after 31 s on task_01J8…", each with its own numbers.
People decide about the cause, once. `pattern` puts a mark in place of addresses, paths, ids and numbers; what
remains is the same for all of them.
"""

import re

MAX_PATTERN = 300
#: An error's beginning tells what it is; looking further costs time and splits groups.
_LOOKED_AT = 2_000
_TRACEBACK = "Traceback (most recent call last)"

# In this order: what an earlier one took, a later one doesn't see. Each is linear: no repetition is nested.
_MARKS = (
    (re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s'\"<>)\]}]+", re.IGNORECASE), "<url>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    # Prefixed ids such as ours: a word, an underscore or a hyphen, and letters with digits among them.
    (re.compile(r"\b[a-z]{2,20}[_-](?=[a-z]{0,40}[0-9])[0-9a-z]{10,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9:.,]+(?:Z|[+-][0-9:]+)?)?"), "<time>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"(?<![\w<])(?:[A-Za-z]:)?(?:[\\/][\w.@%+~-]+){2,}[\\/]?"), "<path>"),
    (re.compile(r"\b(?=[a-f]{0,64}[0-9])[0-9a-f]{8,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"[-+]?[0-9]+(?:[.,:][0-9]+)*"), "<n>"),
)


def pattern(error: str) -> str:
    """What alike errors have in common; never empty, never longer than MAX_PATTERN."""
    text = _said(error)
    for mark, name in _MARKS:
        text = mark.sub(name, text)
    text = " ".join(text.split())
    return text[:MAX_PATTERN].rstrip() or "no message"


def _said(error: str) -> str:
    """The part that tells the cause: of a Python traceback, its last line."""
    text = error.strip()
    if text.startswith(_TRACEBACK):
        text = text.rsplit("\n", 1)[-1].strip()
    return text[:_LOOKED_AT]
