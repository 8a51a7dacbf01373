"""Output: aligned lines and tables for people, JSON for programs."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from lineshaft.model.printable import printable

#: ANSI colours of states, on a terminal.
_COLOURS = {
    **dict.fromkeys(("COMPLETED", "completed", "closed", "active"), "32"),
    **dict.fromkeys(("RUNNING", "CLAIMED", "running"), "36"),
    **dict.fromkeys(("RETRYING", "half_open", "draining"), "33"),
    **dict.fromkeys(("DEAD_LETTERED", "failed", "open"), "1;31"),
    **dict.fromkeys(("PENDING", "pending", "CANCELLED", "cancelled", "offline"), "2"),
    "VALIDATING": "34",
}
#: Cells that are useless if they are cut off: ids, states, numbers and times.
_FIXED = re.compile(r"(task|dag|token|artifact)_\w+|[A-Z_]*|[-\d:.,/~ ]*[smhd]?|yes|no|unlimited")
_GAP = "  "
#: Widths of long texts: optional columns are left out below the first, texts are never cut below the second.
_COMFORTABLE, _NARROWEST = 24, 8


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
            setattr(sys, name, SafeStream(stream))
    # Python's own messages would be coloured by characters that are escaped here.
    os.environ.setdefault("PYTHON_COLORS", "0")


class SafeStream(io.TextIOBase):
    """Escapes what a terminal would act on: titles, errors and outputs come from others."""

    def __init__(self, trusted: io.TextIOWrapper) -> None:
        #: For the command's own colours.
        self.trusted = trusted

    def write(self, text: str) -> int:
        self.trusted.write(printable(text))
        return len(text)

    def flush(self) -> None:
        self.trusted.flush()

    def isatty(self) -> bool:
        return self.trusted.isatty()

    def fileno(self) -> int:
        return self.trusted.fileno()

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> Any:
        return self.trusted.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.trusted.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.trusted.errors


def print_styled(text: str, *, end: str = "\n") -> None:
    """Print text with control characters of our own; everything else in it must be escaped."""
    print(text, end=end, file=getattr(sys.stdout, "trusted", sys.stdout))


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


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str,
    optional: Sequence[str] = (),
) -> None:
    """A table, or the text `empty` if there are no rows. In a pipe everything is printed in full.

    On a narrow terminal the `optional` columns are left out, in this order, and long texts are cut off.
    """
    table = [list(columns), *([shown(cell) for cell in row] for row in rows)]
    if len(table) == 1:
        print(empty)
        return
    if not sys.stdout.isatty():
        for row in _aligned(table):
            print(_GAP.join(row).rstrip())
        return
    most = shutil.get_terminal_size().columns
    for name in optional:
        if _width(table, shrunk=True) > most:
            at = table[0].index(name)
            table = [row[:at] + row[at + 1 :] for row in table]
    table = _cut(table, most)
    head, *body = _aligned(table)
    colours = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print_styled(f"\033[1m{_GAP.join(head).rstrip()}\033[0m" if colours else _GAP.join(head).rstrip())
    for row in body:
        print_styled(_GAP.join(_coloured(cell) if colours else cell for cell in row).rstrip())


def _width(table: Sequence[Sequence[str]], *, shrunk: bool = False) -> int:
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    if shrunk:
        widths = [
            min(width, _COMFORTABLE) if flexible else width
            for width, flexible in zip(widths, _flexible(table), strict=True)
        ]
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _flexible(table: Sequence[Sequence[str]]) -> list[bool]:
    return [not all(_FIXED.fullmatch(cell) for cell in column[1:]) for column in zip(*table, strict=True)]


def _cut(table: list[list[str]], most: int) -> list[list[str]]:
    """Shorten the widest texts until the table fits."""
    flexible = _flexible(table)
    limits = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    excess = _width(table) - most
    while excess > 0:
        width, at = max((limits[at], at) for at in range(len(limits)) if flexible[at] or not any(flexible))
        if width <= _NARROWEST or not any(flexible):
            break
        limits[at] -= 1
        excess -= 1
    return [[_shortened(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in table]


def _shortened(text: str, limit: int) -> str:
    if display_width(text) <= limit:
        return text
    while display_width(text) > limit - 1:
        text = text[:-1]
    return text + "…"


def _aligned(table: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    return [
        [cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True)]
        for row in table
    ]


def _coloured(cell: str) -> str:
    colour = _COLOURS.get(cell.strip())
    return cell if colour is None else f"\033[{colour}m{cell}\033[0m"


def display_width(text: str) -> int:
    """Columns of a terminal: East Asian characters and emoji take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


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
    return printable(" ".join(str(value).splitlines()))


def moment(time: datetime | None) -> str:
    """A time in this machine's time zone, to the second."""
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(time: datetime) -> str:
    """The time since then in one unit, such as 5m."""
    seconds = max((datetime.now(UTC) - time).total_seconds(), 0)
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def usd(amount: Decimal | None) -> str:
    return "" if amount is None else f"{amount:.4f}".rstrip("0").rstrip(".")


def print_more(count: int, hint: str, *, more: bool) -> None:
    """Say that a list was cut off; on standard error, so that a pipe gets only the table."""
    if more:
        print(f"Showing the first {count}. {hint}", file=sys.stderr)
