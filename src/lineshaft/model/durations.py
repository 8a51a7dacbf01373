"""Durations: seconds or a timedelta."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, overload

Duration = float | timedelta


@overload
def seconds(duration: Duration) -> float: ...


@overload
def seconds(duration: Duration | None) -> float | None: ...


def seconds(duration: Duration | None) -> float | None:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def in_seconds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each timedelta by its seconds."""
    return {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in options.items()
    }
