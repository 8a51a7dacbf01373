"""Wrong usage, and the types of arguments that several commands share."""

import argparse
import json
from datetime import datetime
from typing import Any

from lineshaft.errors import LineshaftError


class UsageError(LineshaftError):
    """The command was called incorrectly: exit code 2."""


def positive(text: str) -> int:
    return _whole_number(text, 1, None, "a whole number above 0")


def port(text: str) -> int:
    return _whole_number(text, 0, 65535, "a port from 0 to 65535")


def _whole_number(text: str, least: int, most: int | None, expected: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
    return number


def json_value(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} must be JSON: {error}.") from None


def time_value(flag: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{flag} must be a time in ISO 8601, such as 2030-01-31T09:00:00Z, got {text!r}."
        ) from None
    return time if time.tzinfo else time.astimezone()
