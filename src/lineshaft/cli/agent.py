"""`lineshaft agent`: any command as an agent."""

import argparse
import logging
import os
import shlex
import shutil
import sys
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from lineshaft.child_environment import child_environment
from lineshaft.cli.usage import positive
from lineshaft.errors import LineshaftError
from lineshaft.saved_token import is_readable, path_of
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.agent.agent import Agent

_ABOUT = """\
Run any command as an agent: it claims tasks of the given types and runs the
command for each.

  lineshaft agent --exec ./review.sh --type review --capabilities python

The command receives
  - the task as JSON on standard input: id, type, title, spec, inputs, attempt,
    last_error, steps, …
  - environment variables: LINESHAFT_TASK_ID, _TYPE, _TITLE, _ATTEMPT, _MODEL,
    _TIME_LIMIT_SEC, … and the texts and numbers of the spec:
    {"prompt": "…"} is LINESHAFT_TASK_SPEC_PROMPT

and reports the result
  - standard output is the output: JSON if it is valid JSON, else text
  - exit code 0: done; 75: try again later, without using an attempt; 77: not
    permitted; 64 or 65: the task is invalid; any other code is a crash, and
    the task is retried
  - the end of standard error is stored with a failed attempt

While it runs, it may write JSON objects, one per line, to the file descriptor
$LINESHAFT_FD:
  echo '{"progress": "half way"}' >&$LINESHAFT_FD
  echo '{"spend": 0.02, "tokens_input": 900}' >&$LINESHAFT_FD
  echo '{"step": "search", "result": ["a"], "spend": 0.01}' >&$LINESHAFT_FD
Recorded steps are in "steps" of the next attempt, even after a crash.
docs/agents.md describes steps, checkpoints, artifacts and spawning tasks.

After the time limit, when the task is cancelled, or when the agent stops, the
command and every process it started get SIGTERM, then SIGKILL. On SIGTERM or
Ctrl-C the agent finishes its tasks first; a second signal releases them.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "agent",
        help="run any command as an agent",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--exec", required=True, metavar="COMMAND", dest="command", help="the command with its arguments"
    )
    command.add_argument(
        "--type",
        required=True,
        action="append",
        dest="types",
        metavar="TYPE",
        help="a task type to claim; repeatable",
    )
    command.add_argument(
        "--shell", action="store_true", help="run COMMAND with sh (default: without a shell)"
    )
    who = command.add_argument_group("identity")
    who.add_argument(
        "--id",
        help="a permanent id; its replicas share it, and its budget (default: a new id with every start)",
    )
    who.add_argument(
        "--instance",
        metavar="NAME",
        help="names this process among the replicas of the id, such as a pod's name; starting one of the "
        "same name again supersedes it (default: a name of its own)",
    )
    who.add_argument("--version", metavar="VERSION", help="of the command; recorded with each attempt")
    who.add_argument("--capabilities", type=_names, default=[], metavar="A,B", help="capabilities")
    who.add_argument("--models", type=_names, default=[], metavar="A,B", help="available models")
    who.add_argument(
        "--slots", type=positive, default=3, metavar="N", help="tasks at the same time (default: 3)"
    )
    who.add_argument("--budget", type=_dollars, metavar="USD", help="total budget")
    how = command.add_argument_group("behaviour")
    how.add_argument(
        "--until-idle", action="store_true", help="exit when no tasks are left that could run now"
    )
    how.add_argument(
        "--retries-within",
        type=_delay,
        default=60.0,
        metavar="SEC",
        help="with --until-idle: wait for retries that are due within this time (default: 60)",
    )
    how.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SEC",
        help="time limit per task, in addition to the task's own",
    )
    how.add_argument(
        "--kill-after",
        type=_seconds,
        default=5.0,
        metavar="SEC",
        help="time between SIGTERM and SIGKILL (default: 5)",
    )
    how.add_argument(
        "--retry-later",
        type=_seconds,
        default=60.0,
        metavar="SEC",
        help="delay after exit code 75 (default: 60)",
    )
    how.add_argument(
        "--output",
        choices=["auto", "json", "text"],
        default="auto",
        help="format of standard output (default: auto, JSON if it is valid JSON)",
    )
    how.add_argument(
        "--pass-env",
        action="append",
        default=[],
        metavar="NAME",
        help="also pass this variable of the agent to the command, such as ANTHROPIC_API_KEY (default: "
        "PATH, HOME, LANG, LC_*, TZ, TMPDIR, TERM); repeatable",
    )
    how.add_argument(
        "--run-as",
        metavar="USER",
        help="run the command under this account, which should have no rights; the agent must be root",
    )
    how.add_argument(
        "--heartbeat",
        type=_seconds,
        default=30.0,
        metavar="SEC",
        help="heartbeat interval (default: 30)",
    )
    how.add_argument(
        "--grace",
        type=_seconds,
        default=20.0,
        metavar="SEC",
        help="time for running tasks to finish when the agent stops (default: 20)",
    )
    how.add_argument("--quiet", action="store_true", help="don't show the standard error of commands")
    command.set_defaults(run=run)


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _delay(text: str) -> float:
    return 0.0 if float(text) == 0 else _seconds(text)


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
        raise LineshaftError(f"--exec {text!r} can't be parsed: {error}. Check its quotes.") from None
    if not arguments:
        raise LineshaftError("--exec is empty. Give the command to run for each task.")
    if shutil.which(arguments[0]) is None:
        hint = "" if "/" in arguments[0] else f", or ./{arguments[0]} for a file in this directory"
        raise LineshaftError(
            f"Command {arguments[0]!r} was not found or is not executable. Give its path{hint}; make a "
            "script executable with chmod +x. For variables, pipes and && add --shell."
        )
    return arguments


def run(args: argparse.Namespace) -> int:
    import asyncio  # noqa: PLC0415 - slow to import

    from lineshaft.agent.agent import Agent  # noqa: PLC0415
    from lineshaft.agent.exec import Account, Command  # noqa: PLC0415

    arguments = _arguments(args.command, shell=args.shell)
    logging.basicConfig(
        level=logging.WARNING if args.quiet else logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    agent = Agent(
        args.id,
        instance=args.instance,
        version=args.version,
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
        account=None if args.run_as is None else Account.find(args.run_as),
        time_limit_sec=args.time_limit,
        kill_after_sec=args.kill_after,
        retry_later_sec=args.retry_later,
        output=args.output,
    )
    with command:
        for name in dict.fromkeys(args.types):
            agent.task(name)(command)
        asyncio.run(_work(agent, args))
    return 0


async def _work(agent: "Agent", args: argparse.Namespace) -> None:
    from lineshaft.client.lineshaft import Lineshaft  # noqa: PLC0415

    async with Lineshaft() as shaft:
        home = Settings.load().home
        if args.run_as is None and is_readable(home):
            print(
                f"Warning: the command can read the token in {path_of(home)}, and call the server with it. "
                "Run it under an account of its own: --run-as USER.",
                file=sys.stderr,
                flush=True,
            )
        if not args.quiet:
            types = ", ".join(dict.fromkeys(args.types))
            passed = ", ".join(sorted(child_environment(os.environ, args.pass_env))) or "nothing"
            account = "" if args.run_as is None else f", under the account {args.run_as}"
            print(
                f"Waiting for tasks of type {types}. Commands get of this environment: {passed}{account}. "
                "Ctrl-C stops.",
                file=sys.stderr,
                flush=True,
            )
        await agent.run(
            shaft, until_idle=args.until_idle, retries_within_sec=args.retries_within, optimize=True
        )
