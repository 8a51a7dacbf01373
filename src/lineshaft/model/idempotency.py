"""Hashes of a task's content, to detect that a known idempotency key came with different content.

The hash is the SHA-256 of canonical JSON (sorted keys, no spaces, UTF-8) of the type and the payload
together. A payload alone would not distinguish tasks of different types.

Values without a canonical form are rejected: NaN and the infinities, keys that aren't text (1 and "1" would
collide), types that JSON doesn't have, lone surrogates, and nesting beyond the encoder's recursion limit.
Numbers are hashed as written: 1 and 1.0 are different content.
"""

import hashlib
import json

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown

MAX_DEPTH = 200


def content_hash(task_type: str, payload: object) -> bytes:
    return hashlib.sha256(canonical_json({"type": task_type, "payload": payload})).digest()


def canonical_json(value: object) -> bytes:
    _check_is_json(value)
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError("The content has text that isn't valid Unicode (a lone surrogate).") from None
    except ValueError as error:
        # NaN, an infinity, or an integer of thousands of digits.
        raise InvalidInputError(f"The content has a number that JSON can't hold: {error}") from None


def _check_is_json(value: object) -> None:
    waiting: list[tuple[str, int, object]] = [("content", 0, value)]
    while waiting:
        place, depth, item = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidInputError(f"The content is nested deeper than {MAX_DEPTH} levels; flatten it.")
        if isinstance(item, dict):
            for key, inner in item.items():
                if not isinstance(key, str):
                    fault = f"keys must be text, got {shown(key)}"
                    raise InvalidInputError(errors=[(place, fault)])
                waiting.append((f"{place}.{key[:40]}", depth + 1, inner))
        elif isinstance(item, list | tuple):
            waiting.extend((f"{place}[{index}]", depth + 1, inner) for index, inner in enumerate(item))
        elif not isinstance(item, str | int | float | None):
            fault = f"must be a JSON value, got {type(item).__name__}: {shown(item)}"
            raise InvalidInputError(errors=[(place, fault)])
