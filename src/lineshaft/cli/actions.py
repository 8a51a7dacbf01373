"""What the actions of commands have in common: their parsers, and results as JSON or for people."""

import argparse
import getpass
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from lineshaft.cli.connection import add_flags
from lineshaft.cli.output import print_json, print_more, print_table

T = TypeVar("T")
Actions: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - no public name
Run = Callable[[argparse.Namespace], int]


def add_action(
    actions: Actions, name: str, help_: str, run: Run, description: str | None = None
) -> argparse.ArgumentParser:
    """An action that uses the queue; its help is its description, unless there is a longer one."""
    action = actions.add_parser(name, help=help_, description=description or sentence(help_))
    action.set_defaults(run=run)
    add_flags(action)
    return action


def sentence(help_: str) -> str:
    return f"{help_[0].upper()}{help_[1:]}."


def counted(tasks: int) -> str:
    return f"{tasks} task{'s' * (tasks != 1)}"


def add_reviewer(action: argparse.ArgumentParser) -> None:
    action.add_argument("--reviewer", help="who decides (default: your user name)")


def reviewer(args: argparse.Namespace) -> str:
    return args.reviewer or getpass.getuser()


def print_items(
    args: argparse.Namespace,
    items: Sequence[T],
    columns: Sequence[str],
    row: Callable[[T], Sequence[object]],
    *,
    empty: str,
    optional: Sequence[str] = (),
    more: bool = False,
    hint: str = "--limit N shows more.",
) -> int:
    """A list. `more`: it was cut off, and `hint` says how to see the rest."""
    if args.json:
        print_json(items)
        return 0
    print_table(columns, [row(item) for item in items], empty=empty, optional=optional)
    print_more(len(items), hint, more=more)
    return 0


def print_result(args: argparse.Namespace, result: T, show: Callable[[T], object]) -> int:
    if args.json:
        print_json(result)
    else:
        show(result)
    return 0


def print_done(args: argparse.Namespace, result: Any, message: str) -> int:
    return print_result(args, result, lambda _: print(message))
