"""How commands print: plain aligned lines for people, JSON for programs."""

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def add_json_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_as_text))


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names on the left, what is known about them on the right; a value may have several lines."""
    width = max((len(name) for name, _ in facts), default=0) + 2
    for name, value in facts:
        first, *others = value.splitlines() or [""]
        print(f"{name:<{width}}{first}".rstrip())
        for line in others:
            print(f"{'':<{width}}{line}".rstrip())
