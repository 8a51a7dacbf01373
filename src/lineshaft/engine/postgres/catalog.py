"""Reads named statements from the `.sql` files of the engine.

A module loads the file of its own stem with `catalog.load(__name__)`. A statement starts with
`-- name: claim_tasks`; whole-line comments are for readers and are not sent to the server. A line
`-- include: notify_lanes` is replaced by the fragment of that name, which starts with
`-- fragment: notify_lanes` above in the same file or in `fragments.sql`.

The catalog rejects what psycopg would silently get wrong: a placeholder inside quotes (it would become part
of the text) and a lone percent sign. Statements are always executed with a mapping of parameters, even an
empty one: without a mapping, psycopg leaves `%%` unchanged.
"""

import re
from functools import cache
from importlib.resources import files
from typing import LiteralString

_ENGINE = "lineshaft.engine"
_FRAGMENTS = "postgres/fragments"
_NAME = re.compile(r"^-- (name|fragment): ([a-z][a-z0-9_]*)$")
_INCLUDE = re.compile(r"^\s*-- include: ([a-z][a-z0-9_]*)$")
_QUOTED = re.compile(r"'(?:[^']|'')*'")
_PLACEHOLDER = re.compile(r"%\([a-z][a-z0-9_]*\)s")


@cache
def load(module: str) -> dict[str, LiteralString]:
    """All statements of a module's `.sql` file, by name. `module` is its `__name__`."""
    stem = module.removeprefix(f"{_ENGINE}.").replace(".", "/")
    return parse(_read(stem), source=f"{stem}.sql")


def parse(text: str, *, source: str) -> dict[str, LiteralString]:
    statements, _ = _sections(text, source)
    return {name: _statement(name, lines, source) for name, lines in statements.items()}


def _read(stem: str) -> str:
    return files(_ENGINE).joinpath(f"{stem}.sql").read_text(encoding="utf-8")


@cache
def _shared_fragments() -> dict[str, list[str]]:
    _, fragments = _sections(_read(_FRAGMENTS), f"{_FRAGMENTS}.sql")
    return fragments


def _sections(text: str, source: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The lines of statements, and of fragments, by name."""
    statements: dict[str, list[str]] = {}
    fragments: dict[str, list[str]] = {}
    body: list[str] | None = None
    for line in text.splitlines():
        if named := _NAME.match(line):
            kind, name = named.groups()
            if name in statements or name in fragments:
                raise ValueError(f"{source}: there are two statements named {name}")
            body = (statements if kind == "name" else fragments)[name] = []
        elif (included := _INCLUDE.match(line)) and body is not None:
            fragment = fragments.get(included[1]) or _shared_fragments().get(included[1])
            if fragment is None:
                raise ValueError(f"{source}: unknown fragment {included[1]}; see {_FRAGMENTS}.sql")
            body += fragment
        elif line.lstrip().startswith("--") or not line.strip():
            continue
        elif body is None:
            raise ValueError(f"{source}: {line!r} is before the first '-- name:' line")
        else:
            body.append(line.rstrip())
    return statements, fragments


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
