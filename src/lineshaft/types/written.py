"""Documents that people write: JSON or YAML, within limits."""

import json
from typing import Any

from lineshaft.errors import InvalidInputError

#: Characters of a document, and values in it: far more than one call accepts.
MAX_CHARACTERS = 64 << 20
MAX_VALUES = 1_000_000
#: The longest number, about 4,000 digits: Python refuses to write longer ones as text.
_MAX_BITS = 13_000


def read_written(text: str, name: str) -> Any:
    """The value of a document; `name` says in errors what was read."""
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - slow to import; it has no types

    if len(text) > MAX_CHARACTERS:
        raise InvalidInputError(
            f"{name} is longer than {MAX_CHARACTERS} characters. Submit it in several parts."
        )
    try:
        # JSON is YAML too, but its own parser is faster and has better errors.
        value = json.loads(text) if text.lstrip()[:1] in {"{", "["} else _from_yaml(name, text)
        check_numbers(value)
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidInputError(f"{name} is neither JSON nor YAML: {error}") from None
    except RecursionError:
        raise InvalidInputError(f"{name} is nested too deeply.") from None
    return value


def check_numbers(value: Any) -> None:
    """Raise ValueError for a number that can't be stored or shown; hexadecimal ones may have any length."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, int) and part.bit_length() > _MAX_BITS:
            raise ValueError("a number has more than 3,900 digits; write it as text")
        if isinstance(part, dict):
            pending += part.keys()
            pending += part.values()
        elif isinstance(part, list | tuple | set):
            pending += part


def _from_yaml(name: str, text: str) -> Any:
    import yaml  # noqa: PLC0415 - slow to import

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_VALUES:
            raise InvalidInputError(
                f"{name} has more than {MAX_VALUES} values with its aliases (*NAME) expanded. "
                "Write fewer aliases."
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded_size(node: Any, known: dict[int, int]) -> int:
    """The number of values with all aliases expanded; more than the limit for an alias of itself."""
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1
        # A scalar's value is text; a mapping's are pairs of nodes.
        parts = [] if isinstance(node.value, str) else node.value
        inner = [part for item in parts for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in inner)
    return known[id(node)]
