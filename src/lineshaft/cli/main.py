"""The command `lineshaft`.

Each command is a module with `add_to(commands)`, which declares its arguments, and a function that runs it
and gives the exit code: 0 done, 1 it failed or found a problem, 2 it was called wrongly. argparse, because
the libraries made for this take longer to import than most commands take to run; whatever is heavy is
imported by the command that needs it.
"""

import argparse
import sys
from collections.abc import Sequence

from lineshaft import __version__
from lineshaft.cli import (
    agent,
    approvals,
    completion,
    dag,
    demo,
    dlq,
    doctor,
    events,
    fleet,
    guards,
    migrate,
    stats,
    submit,
    task,
    token,
    up,
)
from lineshaft.cli.output import give_up_output, prepare_streams
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
    agent,
    fleet,
    guards,
    events,
    stats,
    doctor,
    migrate,
    token,
    completion,
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lineshaft",
        description="A durable task queue for fleets of AI agents, on PostgreSQL.",
        epilog="'lineshaft COMMAND --help' tells more about each. Exit codes: 0 done, 1 failed or found a "
        "problem, 2 called wrongly.",
    )
    top.add_argument("--version", action="version", version=f"lineshaft {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return top


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
    except LineshaftError as error:
        print(f"lineshaft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone (`lineshaft … | head`): no fault that anybody has to hear of.
        give_up_output()
        return 1
    except OSError as error:
        give_up_output()
        hint = "Is the disk full, or can standard output not be written?"
        print(f"lineshaft: The operating system refused something: {error}. {hint}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
