"""The command `lineshaft`.

Each command is a module with `add_to(commands)`, which declares its arguments, and a function that runs it
and returns the exit code. It uses argparse, because command-line libraries take longer to import than most
commands take to run. A command imports expensive modules only when it runs.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence

from lineshaft import __version__
from lineshaft.cli import (
    agent,
    agents,
    approvals,
    artifact,
    completion,
    dag,
    demo,
    dlq,
    doctor,
    events,
    guards,
    limits,
    migrate,
    sql,
    stats,
    submit,
    task,
    token,
    up,
)
from lineshaft.cli.output import discard_output, prepare_streams
from lineshaft.cli.usage import UsageError
from lineshaft.errors import LineshaftError

#: In the order of the help.
COMMANDS = (
    up,
    demo,
    submit,
    task,
    dag,
    dlq,
    approvals,
    artifact,
    agent,
    agents,
    limits,
    guards,
    events,
    stats,
    sql,
    doctor,
    migrate,
    token,
    completion,
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
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


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    formatter = argparse.HelpFormatter(prog, max_help_position=16)
    # argparse forgets the indentation of commands, and would put the help of long names on a second line.
    formatter._action_max_length = 14  # noqa: SLF001 - there is no parameter for it
    return formatter


def main(arguments: Sequence[str] | None = None) -> int:
    prepare_streams()
    top = parser()
    args = top.parse_args(arguments)
    if not hasattr(args, "run"):
        top.print_help(sys.stderr)
        return 2
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
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
    print(f"lineshaft: {' '.join(message.split())}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


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
