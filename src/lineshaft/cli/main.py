"""The command `lineshaft`.

Each command is a module with `add_to(commands)`, which declares its arguments, and a function that runs it
and returns the exit code. It uses argparse, because command-line libraries take longer to import than most
commands take to run. A command imports expensive modules only when it runs.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from lineshaft import __version__
from lineshaft.cli import (
    agent,
    agents,
    approvals,
    artifact,
    completion,
    costs,
    dag,
    demo,
    dlq,
    doctor,
    events,
    guards,
    limits,
    loki,
    migrate,
    quotas,
    sources,
    sql,
    stats,
    submit,
    task,
    token,
    types,
    up,
    wait,
    watch,
)
from lineshaft.cli.output import discard_output, prepare_streams, print_note
from lineshaft.cli.usage import UsageError
from lineshaft.errors import InvalidInputError, LineshaftError

#: In the order of the help.
COMMANDS = (
    up,
    demo,
    submit,
    task,
    wait,
    dag,
    dlq,
    approvals,
    sources,
    watch,
    artifact,
    agent,
    agents,
    types,
    limits,
    quotas,
    guards,
    events,
    stats,
    costs,
    sql,
    doctor,
    loki,
    migrate,
    token,
    completion,
)


class _Parser(argparse.ArgumentParser):
    """Suggests the command that was probably meant; wraps its errors on a terminal."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print_note(f"{self.prog}: error: {message}")
        sys.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown options here: the parser above would show its own usage."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self.get_default("run") is not None:
            import difflib  # noqa: PLC0415 - only for the error

            known = [name for name in self._option_string_actions if name.startswith("--")]
            meant = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, cutoff=0.75)
            advice = f"; did you mean {meant[0]}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        known = action.choices
        if not isinstance(action, argparse._SubParsersAction) or known is None or value in known:  # noqa: SLF001
            super()._check_value(action, value)
            return
        import difflib  # noqa: PLC0415 - only for the error

        near = difflib.get_close_matches(str(value), [str(name) for name in known], n=1, cutoff=0.5)
        what = "action" if " " in self.prog else "command"
        hint = f"Did you mean '{self.prog} {near[0]}'?" if near else f"Known: {', '.join(map(str, known))}."
        raise argparse.ArgumentError(None, f"unknown {what} {value!r}. {hint}")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="lineshaft",
        formatter_class=_help_formatter,
        description="A durable task queue for fleets of AI agents, on PostgreSQL.",
        epilog="Run 'lineshaft COMMAND --help' for the options of a command. Exit codes: 0 success, "
        "1 failure or a problem was found, 2 wrong usage.",
    )
    top.add_argument("--version", action="version", version=f"lineshaft {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return top


def _with_default_action(top: argparse.ArgumentParser, arguments: Sequence[str]) -> Sequence[str]:
    """A command without an action lists, if it has a list: 'lineshaft agents --json'."""
    command = _choices(top).get(arguments[0]) if arguments else None
    if command is None or "list" not in _choices(command):
        return arguments
    rest = list(arguments[1:])
    if rest and (not rest[0].startswith("-") or rest[0] in {"-h", "--help"}):
        return arguments
    return [arguments[0], "list", *rest]


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:  # noqa: SLF001 - there is no public way to it
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return dict(action.choices)
    return {}


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    formatter = argparse.HelpFormatter(prog, max_help_position=16)
    # argparse forgets the indentation of commands, and would put the help of long names on a second line.
    formatter._action_max_length = 14  # noqa: SLF001 - there is no parameter for it
    return formatter


def main(arguments: Sequence[str] | None = None) -> int:
    prepare_streams()
    top = parser()
    args = top.parse_args(_with_default_action(top, sys.argv[1:] if arguments is None else arguments))
    if not hasattr(args, "run"):
        top.print_help(sys.stderr)
        return 2
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        # Ends the line with the terminal's ^C.
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output is gone (`lineshaft … | head`), which is not an error.
        discard_output()
        return 1
    except Exception as error:  # noqa: BLE001 - one line instead of a traceback
        return _report(error)
    return code


def _report(error: Exception) -> int:
    """Print one line, and return the exit code."""
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        discard_output()
        message = f"Operating system error: {error}. Is the disk full, or is standard output closed?"
    else:
        message = str(error) if isinstance(error, LineshaftError) else _unexpected(error)
    print_note(f"lineshaft: {' '.join(message.split())}")
    return 2 if isinstance(error, UsageError | InvalidInputError) else 1


def _unexpected(error: Exception) -> str:
    """The kind and place of an error. Further lines of its text may contain values of the database."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    first_line = (str(error).splitlines() or [""])[0]
    return (
        f"Unexpected error {type(error).__name__} ({place.filename}:{place.lineno}): {first_line}. "
        "The command may or may not have taken effect. Run 'lineshaft doctor'."
    )


if __name__ == "__main__":
    sys.exit(main())
