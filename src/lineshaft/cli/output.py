"""Output: aligned lines and tables for people, JSON for programs."""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
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
    """Keep a closed stream, or one that can't write all characters, from ending the command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end of the process
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Discard buffered output, so that writing it does not fail again when Python exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_json(value: Any) -> None:
    print(as_json(value, indent=2))


def as_json(value: Any, *, indent: int = -1) -> str:
    """The JSON of the HTTP API; escaped where standard output can't write all characters."""
    import msgspec  # noqa: PLC0415 - slow to import

    from lineshaft.types.json import encode  # noqa: PLC0415

    text = msgspec.json.format(encode(value), indent=indent).decode()
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        return re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    return text


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names on the left, values on the right; a value may have several lines."""
    width = max((len(name) for name, _ in facts), default=0) + 2
    for name, value in facts:
        first, *others = value.splitlines() or [""]
        print(f"{name:<{width}}{first}".rstrip())
        for line in others:
            print(f"{'':<{width}}{line}".rstrip())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table, or the text `empty` if there are no rows. In a pipe: aligned text that is never cut off."""
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
    """One cell: empty for None, texts on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    return " ".join(str(value).splitlines())


def moment(time: datetime | None) -> str:
    """A time in this machine's time zone, to the second."""
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def usd(amount: Decimal | None) -> str:
    return "" if amount is None else f"{amount:.4f}".rstrip("0").rstrip(".")


def print_more(count: int, hint: str, *, more: bool) -> None:
    """Say that a list was cut off; on standard error, so that a pipe gets only the table."""
    if more:
        print(f"Showing the first {count}. {hint}", file=sys.stderr)
