"""Whether an output has a part that matches a pattern.

The engine is RE2, which takes time in proportion to the text, whatever the pattern. A text is matched as it
is; any other output as its JSON. A pattern matches anywhere, unless it has ^ or $.
"""

from functools import lru_cache
from typing import Any

import re2  # type: ignore[import-untyped]

from lineshaft.checks.verdict import PASSED, CandidateOutput, Verdict, refused

MAX_LENGTH = 10_000
#: What the compiled pattern and its matching may take.
_MEMORY_BYTES = 8 << 20


def fault(pattern: Any) -> str | None:
    if not isinstance(pattern, str) or not pattern:
        return f"must be a pattern, a text that is not empty; got {type(pattern).__name__}"
    if len(pattern) > MAX_LENGTH:
        return f"must be a pattern of at most {MAX_LENGTH} characters, got {len(pattern)}"
    try:
        _compiled(pattern)
    except re2.error as error:
        return f"is no pattern that RE2 can match in linear time: {_text(error)}"
    except UnicodeEncodeError:
        return "must be valid Unicode"
    return None


def check(pattern: Any, handed_in: CandidateOutput) -> Verdict:
    if _compiled(pattern).search(handed_in.text) is not None:
        return PASSED
    return refused(f"output.data has nothing that matches {pattern}")


@lru_cache(maxsize=1_000)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MEMORY_BYTES
    options.log_errors = False
    return re2.compile(pattern, options)


def _text(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)
