"""Reads named statements from the `.sql` files of the engine.

A statement starts with `-- name: claim_tasks`; whole-line comments explain it to readers and are not sent to
the server. What psycopg would get wrong silently is refused here, when the file is read: a placeholder inside
quotes (it would become part of the text) and a lone percent sign. Statements are always executed with a
mapping of parameters, if only an empty one: without, psycopg leaves `%%` as it is.
"""

import re
from functools import cache
from importlib.resources import files
from typing import LiteralString

_ENGINE = "lineshaft.engine"
_NAME = re.compile(r"^-- name: ([a-z][a-z0-9_]*)$")
_QUOTED = re.compile(r"'(?:[^']|'')*'")
_PLACEHOLDER = re.compile(r"%\([a-z][a-z0-9_]*\)s")


@cache
def load(*stems: str) -> dict[str, LiteralString]:
    """All statements of these files, by name. A stem is a path below `engine/`, as in `claim/claims`."""
    found: dict[str, LiteralString] = {}
    for stem in stems:
        text = files(_ENGINE).joinpath(f"{stem}.sql").read_text(encoding="utf-8")
        new = parse(text, source=f"{stem}.sql")
        if twice := found.keys() & new.keys():
            raise ValueError(f"{', '.join(sorted(twice))} of {stem}.sql also stands in another of {stems}")
        found |= new
    return found


def parse(text: str, *, source: str) -> dict[str, LiteralString]:
    bodies: dict[str, list[str]] = {}
    body: list[str] | None = None
    for line in text.splitlines():
        if named := _NAME.match(line):
            name = named[1]
            if name in bodies:
                raise ValueError(f"{source}: there are two statements named {name}")
            body = bodies[name] = []
        elif line.lstrip().startswith("--") or not line.strip():
            continue
        elif body is None:
            raise ValueError(f"{source}: {line!r} stands before the first '-- name:' line")
        else:
            body.append(line.rstrip())
    return {name: _statement(name, lines, source) for name, lines in bodies.items()}


def _statement(name: str, lines: list[str], source: str) -> LiteralString:
    sql = "\n".join(lines).rstrip().removesuffix(";")
    if not sql:
        raise ValueError(f"{source}: {name} is empty")
    for quoted in _QUOTED.findall(sql):
        if _PLACEHOLDER.search(quoted):
            raise ValueError(f"{source}: {name} has a placeholder inside quotes: {quoted}")
    if "%" in _PLACEHOLDER.sub("", sql).replace("%%", ""):
        raise ValueError(f"{source}: {name} has a lone percent sign; write %% or use a named placeholder")
    # The comment names the statement in pg_stat_activity and in the server's log. The text comes from files
    # of this package only, which is what LiteralString promises.
    return f"/* lineshaft {name} */ {sql}"
