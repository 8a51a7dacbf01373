"""Output: aligned lines and tables for people, JSON for programs."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineshaft.model.printable import printable
from lineshaft.model.short_ids import short_id, short_ids

if TYPE_CHECKING:
    from lineshaft.types import Event

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
_FIXED = re.compile(
    r"(task|dag|token|artifact)_\w+|\w{8}-\w{4,16}|[A-Z_]*|[-\d:.,/~ ]*[smhd]?|\d+ of \d+|yes|no|unlimited"
    r"|now|in \d+[smhd]|\d+[smhd] ago"
)
_GAP = "  "
#: The narrowest terminal for which text is wrapped.
_LEAST_COLUMNS = 40
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


class Id(str):
    """An id in a table or a sentence: its short form on a terminal, the whole id in a pipe."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class When:
    """A time in a table: relative on a terminal, in ISO 8601 in a pipe."""

    at: datetime | None


class Verbatim(str):
    """Text that is never wrapped, because it is copied: JSON, commands, tracebacks."""

    __slots__ = ()


def pretty(value: Any) -> Verbatim:
    return Verbatim(json.dumps(value, indent=2, ensure_ascii=False))


def on_terminal() -> bool:
    return sys.stdout.isatty()


def columns() -> int:
    return shutil.get_terminal_size().columns


def actor_of(event: "Event") -> str | None:
    """Who did it by hand; None: unknown, or no person did."""
    actor = event.data.get("actor") if isinstance(event.data, dict) else None
    return None if actor is None else str(actor)


def id_for_people(name: str) -> str:
    return short_id(name) if on_terminal() else name


def print_text(text: str) -> None:
    """A paragraph, wrapped on a terminal."""
    print("\n".join(_wrapped(text, 0)))


def print_note(text: str) -> None:
    """A line on standard error, at once: standard output has only results. Wrapped on a terminal."""
    width = columns() if sys.stderr.isatty() else 0
    wrapped = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False) if width else text
    print(wrapped, file=sys.stderr, flush=True)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names on the left, values on the right; a value may have several lines."""
    width = max((display_width(name) for name, _ in facts), default=0) + 2
    for name, value in facts:
        lines = value.splitlines() if isinstance(value, Verbatim) else _wrapped(value, width)
        first, *others = lines or [""]
        print(f"{name}{' ' * (width - display_width(name))}{first}".rstrip())
        for line in others:
            print(f"{'':<{width}}{line}".rstrip())


def _wrapped(text: str, indent: int) -> list[str]:
    room = columns() - indent
    if not on_terminal() or room < _LEAST_COLUMNS:
        return text.splitlines()
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
    ]


def print_table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str,
    optional: Sequence[str] = (),
) -> None:
    """A table, or the text `empty` if there are no rows. In a pipe everything is printed in full.

    On a terminal columns without a value are left out. On a narrow one the `optional` columns are left out
    too, in this order, and long texts are cut off.
    """
    cells = [list(row) for row in rows]
    if not cells:
        print_text(empty)
        return
    short = short_ids(cell for row in cells for cell in row if isinstance(cell, Id)) if on_terminal() else {}
    table = [list(names), *([_cell(cell, short) for cell in row] for row in cells)]
    if not on_terminal():
        for line in _aligned(table):
            print(_GAP.join(line).rstrip())
        return
    most = columns()
    for name in names:
        if not any(row[table[0].index(name)] for row in table[1:]):
            table = _without(table, name)
    for name in optional:
        if name in table[0] and _width(table, shrunk=True) > most:
            table = _without(table, name)
    table = _cut(table, most)
    head, *body = _aligned(table)
    colours = use_colours()
    print_styled(f"\033[1m{_GAP.join(head).rstrip()}\033[0m" if colours else _GAP.join(head).rstrip())
    for line in body:
        print_styled(_GAP.join(_coloured(cell) if colours else cell for cell in line).rstrip())


def use_colours() -> bool:
    return on_terminal() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _cell(value: object, short: Mapping[str, str]) -> str:
    if isinstance(value, Id):
        return short.get(value, str(value))
    if isinstance(value, When):
        return relative(value.at) if on_terminal() else iso(value.at)
    return shown(value)


def _without(table: list[list[str]], name: str) -> list[list[str]]:
    at = table[0].index(name)
    return [row[:at] + row[at + 1 :] for row in table]


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
    return [[cut(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in table]


def cut(text: str, limit: int) -> str:
    """At most so many columns of the text."""
    if display_width(text) <= limit:
        return text
    used = 0
    for at, character in enumerate(text):
        used += display_width(character)
        if used > limit - 1:
            return text[:at] + "…"
    return text


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


def iso(time: datetime | None) -> str:
    """A time in this machine's time zone, for programs."""
    return "" if time is None else time.astimezone().isoformat(timespec="seconds")


def relative(time: datetime | None) -> str:
    """The time from now in one unit, such as `5m ago` or `in 3h`."""
    if time is None:
        return ""
    seconds = (datetime.now(UTC) - time).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def moment_and_age(time: datetime | None) -> str:
    if time is None or not on_terminal():
        return iso(time)
    return f"{moment(time)} ({relative(time)})"


def duration(seconds: float) -> str:
    """In one unit, rounded down, such as 5m."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds / length)}{unit}"
    return f"{int(seconds)}s"


def usd(amount: Decimal | None) -> str:
    return "" if amount is None else f"{amount:.4f}".rstrip("0").rstrip(".")


def usd_left(left: Decimal, budget: Decimal) -> str:
    """What is left of a budget, or by how much it is exceeded."""
    if left < 0:
        return f"over by {usd(-left)} USD, of {usd(budget)} USD"
    return f"{usd(left)} of {usd(budget)} USD left"


def print_more(count: int, hint: str, *, more: bool) -> None:
    """Say that a list was cut off; on standard error, so that a pipe gets only the table."""
    if more:
        print_note(f"Showing the first {count}. {hint}")
