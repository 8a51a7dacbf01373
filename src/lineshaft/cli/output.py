"""How commands print: plain aligned lines and tables for people, JSON for programs."""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: States by colour, on a terminal.
_STYLES = {
    "COMPLETED": "green", "completed": "green", "RUNNING": "cyan", "CLAIMED": "cyan", "running": "cyan",
    "VALIDATING": "blue", "READY": "default", "PENDING": "dim", "pending": "dim", "RETRYING": "yellow",
    "DEAD_LETTERED": "bold red", "failed": "bold red", "open": "bold red", "CANCELLED": "dim",
    "cancelled": "dim", "half_open": "yellow", "closed": "green", "active": "green", "draining": "yellow",
    "offline": "dim",
}  # fmt: skip


def add_json_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for programs")


def prepare_streams() -> None:
    """So that a closed stream, or one that can't write all characters, ends no command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end of the process
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_output() -> None:
    """Nothing can be written any more: what waits to be written must not fail once more when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_json(value: Any) -> None:
    print(as_json(value, indent=2))


def as_json(value: Any, *, indent: int | None = None) -> str:
    """In characters that standard output can write: JSON has a way to spell all others."""
    spelt = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    return json.dumps(value, indent=indent, ensure_ascii=spelt, default=_as_text)


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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table; `empty` says what to do when there is nothing. In a pipe: aligned text, nothing cut off."""
    texts = [[shown(cell) for cell in row] for row in rows]
    if not texts:
        print(empty)
        return
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 - slow to import
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in texts:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "default")) for cell in row))
        Console().print(table)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *texts, strict=True)]
    for row in [list(columns), *texts]:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def shown(value: object) -> str:
    """One cell: nothing for None, times to the second, texts on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    return " ".join(str(value).splitlines())


def moment(text: str | None) -> str:
    """A time of the API, to the second, as this machine's clock shows it."""
    if text is None:
        return ""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def usd(amount: float | None) -> str:
    return "" if amount is None else f"{amount:.4f}".rstrip("0").rstrip(".")
