"""Wrong usage, and the types of arguments that several commands share."""

import argparse
import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

from lineshaft.errors import LineshaftError


class UsageError(LineshaftError):
    """The command was called incorrectly: exit code 2."""


def positive(text: str) -> int:
    return _whole_number(text, 1, None, "a whole number above 0")


def whole(text: str) -> int:
    return _whole_number(text, 0, None, "a whole number, 0 or more")


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # Also false for NaN.
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return number


def dollars(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"must be an amount of dollars, got {text!r}")
    return amount


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


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def time_or_age(text: str) -> datetime:
    """A time in ISO 8601, or an age such as 10m."""
    unit = _UNITS.get(text[-1:])
    if unit is not None and text[:-1].isascii() and text[:-1].isdigit() and len(text) < 8:  # noqa: PLR2004
        return datetime.now(UTC) - timedelta(seconds=unit * int(text[:-1]))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be an age such as 10m, 2h or 7d, or a time in ISO 8601, got {text!r}"
        ) from None
    return time if time.tzinfo else time.astimezone()


def time_value(flag: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{flag} must be a time in ISO 8601, such as 2030-01-31T09:00:00Z, got {text!r}."
        ) from None
    return time if time.tzinfo else time.astimezone()
