"""The `regex` check: a part of an output matches a pattern.

The engine is RE2, which takes linear time for every pattern. A string is matched as it is, any other output
as JSON. A pattern matches anywhere, unless it has ^ or $.
"""

from functools import lru_cache
from typing import Any

import re2  # type: ignore[import-untyped]

from lineshaft.checks.verdict import PASSED, CandidateOutput, Verdict, rejected

MAX_LENGTH = 10_000
#: The memory limit for the compiled pattern and for matching, of each pattern that is kept.
_MEMORY_BYTES = 1 << 20
_KEPT = 64


def fault(pattern: Any) -> str | None:
    if not isinstance(pattern, str) or not pattern:
        return f"must be a pattern, a string that is not empty; got {type(pattern).__name__}"
    if len(pattern) > MAX_LENGTH:
        return f"must be a pattern of at most {MAX_LENGTH} characters, got {len(pattern)}"
    try:
        _compiled(pattern)
    except re2.error as error:
        return f"is not a pattern that RE2 can match in linear time: {_text(error)}"
    except UnicodeEncodeError:
        return "must be valid Unicode"
    return None


def check(pattern: Any, candidate: CandidateOutput) -> Verdict:
    if _compiled(pattern).search(candidate.text) is not None:
        return PASSED
    return rejected(f"output.data doesn't match {pattern}")


@lru_cache(maxsize=_KEPT)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MEMORY_BYTES
    options.log_errors = False
    return re2.compile(pattern, options)


def _text(error: Exception) -> str:
    message = error.args[0] if error.args else ""
    return message.decode(errors="replace") if isinstance(message, bytes) else str(message)
