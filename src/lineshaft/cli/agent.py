"""`lineshaft agent`: any command works on tasks."""

import argparse
import logging
import shlex
import shutil
import sys
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from lineshaft.errors import LineshaftError

if TYPE_CHECKING:
    from lineshaft.agent.agent import Agent

_ABOUT = """\
Makes any program an agent: it claims tasks of some types and runs a command for each.

  lineshaft agent --exec ./review.sh --type review --capabilities python

The command gets
  - the task as JSON on its standard input: id, type, title, spec, inputs, attempt, last_error, steps, …
  - the essentials as variables: LINESHAFT_TASK_ID, _TYPE, _TITLE, _ATTEMPT, _MODEL, _TIME_LIMIT_SEC, …,
    and what the spec has in texts and numbers: {"prompt": "…"} is LINESHAFT_TASK_SPEC_PROMPT

and tells how it went
  - what it prints is the output: JSON if it is JSON, else text
  - exit code 0 done, 75 not now (it comes back later, without using an attempt), 77 not allowed,
    64 or 65 the task is wrong; any other one is a crash, and the task is tried again
  - the end of its standard error is kept with an attempt that failed

While it runs it may write JSON objects, one a line, to the file descriptor $LINESHAFT_FD:
  echo '{"progress": "half way"}' >&$LINESHAFT_FD
  echo '{"spend": 0.02, "tokens_input": 900}' >&$LINESHAFT_FD
  echo '{"step": "search", "result": ["a", "b"], "spend": 0.01}' >&$LINESHAFT_FD
A step that was recorded is in "steps" of the next attempt, also after a crash. docs/agents.md has the rest:
steps, checkpoints, artifacts, spawning tasks and waiting for them.

After the time limit, when the task is cancelled, or when the agent stops, the command and all it has started
get SIGTERM, and SIGKILL a little later. SIGTERM or Ctrl-C lets the agent finish its tasks first; a second one
hands them back.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "agent",
        help="work on tasks with any command",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--exec", required=True, metavar="COMMAND", dest="command", help="the command, with its arguments"
    )
    command.add_argument(
        "--type",
        required=True,
        action="append",
        dest="types",
        metavar="TYPE",
        help="a type of tasks to take; repeatable",
    )
    command.add_argument(
        "--shell", action="store_true", help="let sh run COMMAND; else it is run as it is, without a shell"
    )
    who = command.add_argument_group("who it is")
    who.add_argument("--id", help="its name for good; without one it gets a new one with every start")
    who.add_argument("--capabilities", type=_names, default=[], metavar="A,B", help="what it can do")
    who.add_argument("--models", type=_names, default=[], metavar="A,B", help="the models it has")
    who.add_argument("--slots", type=int, default=3, metavar="N", help="tasks at once (default: 3)")
    who.add_argument("--budget", type=_dollars, metavar="USD", help="what it may spend in all")
    how = command.add_argument_group("how it works")
    how.add_argument("--until-idle", action="store_true", help="end when there is nothing left to do")
    how.add_argument(
        "--time-limit", type=_seconds, metavar="SEC", help="for one task; its own limit counts anyway"
    )
    how.add_argument(
        "--kill-after",
        type=_seconds,
        default=5.0,
        metavar="SEC",
        help="between SIGTERM and SIGKILL (default: 5)",
    )
    how.add_argument(
        "--retry-later",
        type=_seconds,
        default=60.0,
        metavar="SEC",
        help="how long exit code 75 waits (default: 60)",
    )
    how.add_argument(
        "--output",
        choices=["auto", "json", "text"],
        default="auto",
        help="what it prints; auto: JSON if it is (default)",
    )
    how.add_argument(
        "--pass-env",
        action="append",
        default=[],
        metavar="NAME",
        help="give the command this variable too, though it is a secret of the agent, such as "
        "LINESHAFT_DATABASE_URL; repeatable",
    )
    how.add_argument(
        "--heartbeat",
        type=_seconds,
        default=30.0,
        metavar="SEC",
        help="how often it says that it lives (default: 30)",
    )
    how.add_argument(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="SEC",
        help="how long tasks may go on after it was asked to stop (default: 30)",
    )
    how.add_argument("--quiet", action="store_true", help="don't show what commands write to standard error")
    command.set_defaults(run=run)


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _dollars(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount < 0:
        raise argparse.ArgumentTypeError(f"must be an amount of dollars, got {text!r}")
    return amount


def _arguments(text: str, *, shell: bool) -> list[str]:
    if shell:
        return ["/bin/sh", "-c", text]
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise LineshaftError(f"--exec {text!r} can't be read: {error}. Check its quotes.") from None
    if not arguments:
        raise LineshaftError("--exec is empty. Give it the command that works on a task.")
    if shutil.which(arguments[0]) is None:
        hint = "" if "/" in arguments[0] else f", or ./{arguments[0]} for one in this directory"
        raise LineshaftError(
            f"There is no command {arguments[0]!r} that can be run. Give its path{hint}; a script has to "
            "be executable (chmod +x). For variables, pipes and && add --shell."
        )
    return arguments


def run(args: argparse.Namespace) -> int:
    import asyncio  # noqa: PLC0415 - slow to import

    from lineshaft.agent.agent import Agent  # noqa: PLC0415
    from lineshaft.agent.exec import Command  # noqa: PLC0415

    arguments = _arguments(args.command, shell=args.shell)
    logging.basicConfig(
        level=logging.WARNING if args.quiet else logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    agent = Agent(
        args.id,
        type="command",
        capabilities=args.capabilities,
        models=args.models,
        max_concurrent_tasks=args.slots,
        budget_usd=args.budget,
        heartbeat_interval_sec=args.heartbeat,
        grace_sec=args.grace,
    )
    command = Command(
        arguments,
        pass_env=args.pass_env,
        time_limit_sec=args.time_limit,
        kill_after_sec=args.kill_after,
        retry_later_sec=args.retry_later,
        output=args.output,
    )
    with command:
        for name in dict.fromkeys(args.types):
            agent.task(name)(command)
        asyncio.run(_work(agent, until_idle=args.until_idle))
    return 0


async def _work(agent: "Agent", *, until_idle: bool) -> None:
    from lineshaft.client.lineshaft import Lineshaft  # noqa: PLC0415

    async with Lineshaft() as shaft:
        await agent.run(shaft, until_idle=until_idle, optimize=True)
