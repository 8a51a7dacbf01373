"""`lineshaft agent`: runs agents of Python modules, or any command as an agent."""

import argparse
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING

from lineshaft.child_environment import child_environment
from lineshaft.cli.usage import UsageError, positive
from lineshaft.errors import LineshaftError
from lineshaft.saved_token import is_readable, path_of
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.agent.agent import Agent

_ABOUT = """\
Run agents of Python modules in one process. The current folder is searched
for modules first.

  lineshaft agent app:agent
  lineshaft agent app:writer package.module:coder --reload

Or run any command as an agent: it claims tasks of the given types and runs
the command for each.

  lineshaft agent --exec ./review.sh --type review --capabilities python

The command receives
  - the task as JSON on standard input: id, type, title, spec, inputs, attempt,
    last_error, steps, …
  - environment variables: LINESHAFT_TASK_ID, _TYPE, _TITLE, _ATTEMPT, _MODEL,
    _TIME_LIMIT_SEC, … and the texts and numbers of the spec:
    {"prompt": "…"} is LINESHAFT_TASK_SPEC_PROMPT
  - the folder $LINESHAFT_INPUTS with the artifacts of spec.context_refs

and reports the result
  - standard output is the output: JSON if it is valid JSON, else text
  - files in the folder $LINESHAFT_OUTPUTS become artifacts of the output
  - exit code 0: done; 75: try again later, without using an attempt; 77: not
    permitted; 64 or 65: the task is invalid; any other code is an error,
    and the task is retried
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

Or let a language model do the tasks, without writing a handler:

  lineshaft agent --llm --type research --model openai:gpt-5-mini
  lineshaft submit research --prompt 'Compare three message brokers.'

The prompt is spec.prompt, with the rest of the spec, the inputs and the
artifacts of the task. The output is text, or JSON that fits the schema of the
task's json-schema gate. Calls of the model and of tools are durable steps.
docs/models.md says how to set a model, its key and its price.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "agent",
        help="run agents of Python modules, any command or a language model as an agent",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "agents", nargs="*", metavar="MODULE:AGENT", help="an agent in a Python module, such as app:agent"
    )
    command.add_argument(
        "--reload",
        action="store_true",
        help="for development: restart the agents of modules when a .py file below this folder changes",
    )
    command.add_argument("--exec", metavar="COMMAND", dest="command", help="the command with its arguments")
    command.add_argument(
        "--type",
        action="append",
        dest="types",
        metavar="TYPE",
        help="a task type to claim; repeatable",
    )
    command.add_argument(
        "--shell", action="store_true", help="run COMMAND with sh (default: without a shell)"
    )
    llm = command.add_argument_group("language models")
    llm.add_argument(
        "--llm", action="store_true", help="let a language model do the tasks; needs lineshaft[llm]"
    )
    llm.add_argument(
        "--model",
        metavar="MODEL",
        help="the model, such as openai:gpt-5-mini (default: LINESHAFT_LLM_MODEL)",
    )
    llm.add_argument(
        "--tools",
        metavar="MODULE:TOOLS",
        help="functions and toolsets that the model may use, such as app:tools",
    )
    llm.add_argument(
        "--instructions", metavar="TEXT", help="how to do the tasks; @FILE reads them from a file"
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
        "--account",
        action="append",
        default=[],
        type=_account,
        dest="accounts",
        metavar="NAME[=FILE]",
        help="an account with a provider, with the file of the variables that the command needs to use it; "
        "repeatable: each task gets one that is open, as LINESHAFT_TASK_ACCOUNT",
    )
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
    how.add_argument(
        "--quiet", action="store_true", help="show only warnings and failures, and no output of commands"
    )
    command.set_defaults(run=run, parser=command)


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _account(text: str) -> tuple[str, Path | None]:
    from lineshaft.model.accounts import account_fault  # noqa: PLC0415 - slow to import

    name, named, file = text.partition("=")
    if fault := account_fault(name):
        raise argparse.ArgumentTypeError(fault)
    return name, Path(file).absolute() if named else None


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


#: Options that apply to agents of modules as well.
_COMMON = frozenset({"agents", "reload", "until_idle", "retries_within", "quiet", "run", "parser"})


def run(args: argparse.Namespace) -> int:
    if args.agents:
        return _run_modules(args)
    if args.reload:
        raise UsageError("--reload is for agents of modules: lineshaft agent MODULE:AGENT --reload.")
    if args.llm:
        return _run_llm(args)
    _refuse(args, _OF_LLM, "is for language models: add --llm")
    if args.command is None or not args.types:
        missing = "--exec COMMAND" if args.command is None else "--type TYPE"
        raise UsageError(
            f"{missing} is missing. Name agents, such as app:agent, or a command with the types of its "
            "tasks: --exec COMMAND --type TYPE; or let a language model do them: --llm --type TYPE."
        )
    return _run_command(args)


def _run_modules(args: argparse.Namespace) -> int:
    parser: argparse.ArgumentParser = args.parser
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    if others := sorted(set(given) - _COMMON):
        flags = {"command": "--exec", "types": "--type"}
        raise UsageError(
            f"{flags.get(others[0], '--' + others[0].replace('_', '-'))} is for commands. Agents of modules "
            "have their options in Python: Agent('writer', max_concurrent_tasks=5)."
        )
    if args.reload:
        from lineshaft.cli.agent_reload import run_reloading  # noqa: PLC0415 - slow to import

        return run_reloading(
            [
                *args.agents,
                *(["--until-idle"] if args.until_idle else []),
                *("--retries-within", str(args.retries_within)),
                *(["--quiet"] if args.quiet else []),
            ]
        )
    from lineshaft.cli.agent_modules import load_agents  # noqa: PLC0415 - slow to import

    # What the agents print is their own: only titles and errors of others are escaped.
    sys.stdout, sys.stderr = (getattr(stream, "trusted", stream) for stream in (sys.stdout, sys.stderr))
    _run(load_agents(args.agents), args)
    return 0


#: Options that apply to language models only, and those that apply to commands only.
_OF_LLM = ("model", "tools", "instructions")
_OF_COMMANDS = ("command", "shell", "kill_after", "retry_later", "output", "pass_env", "run_as")


def _refuse(args: argparse.Namespace, options: Sequence[str], why: str) -> None:
    parser: argparse.ArgumentParser = args.parser
    for name in options:
        if getattr(args, name) != parser.get_default(name):
            flag = "exec" if name == "command" else name.replace("_", "-")
            raise UsageError(f"--{flag} {why}.")


def _run_llm(args: argparse.Namespace) -> int:
    _refuse(args, _OF_COMMANDS, "is for commands, and --llm has none")
    if not args.types:
        raise UsageError("--type TYPE is missing: name the types of the tasks that the model does.")
    from lineshaft.integrations.llm.configuration import check_installed  # noqa: PLC0415 - rarely used

    check_installed("--llm")
    from lineshaft.agent.agent import Agent  # noqa: PLC0415 - slow to import
    from lineshaft.cli.agent_modules import load_tools  # noqa: PLC0415
    from lineshaft.integrations.llm.client import LLMClient  # noqa: PLC0415
    from lineshaft.integrations.pydantic_ai import PromptAgent  # noqa: PLC0415

    client = LLMClient.from_settings(model=args.model)
    # Each model is made once here, so that a missing key or package is found before the first task.
    models = args.models or [client.config.named(), *client.config.fallback_models]
    for name in models:
        client.model(name)
    handler = PromptAgent(
        instructions=_instructions(args.instructions),
        tools=[] if args.tools is None else load_tools(args.tools),
        client=client,
    )
    agent = Agent(
        args.id,
        instance=args.instance,
        version=args.version,
        type="llm",
        capabilities=args.capabilities,
        models=models,
        max_concurrent_tasks=args.slots,
        budget_usd=args.budget,
        heartbeat_interval_sec=args.heartbeat,
        grace_sec=args.grace,
    )
    for name in dict.fromkeys(args.types):
        agent.task(name, time_limit_sec=args.time_limit)(handler)
    _run([agent], args)
    return 0


def _instructions(text: str | None) -> str:
    if text is None or not text.startswith("@"):
        return text or ""
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--instructions {text} can't be read: {error}") from None


def _run(
    agents: "Sequence[Agent]", args: argparse.Namespace, *, before: Callable[[], None] = lambda: None
) -> None:
    import asyncio  # noqa: PLC0415 - slow to import

    from lineshaft.agent.program import run_agents  # noqa: PLC0415
    from lineshaft.client.lineshaft import Lineshaft  # noqa: PLC0415
    from lineshaft.logs import shown  # noqa: PLC0415

    async def work() -> None:
        async with Lineshaft() as shaft:
            before()
            await run_agents(
                agents,
                shaft,
                until_idle=args.until_idle,
                retries_within_sec=args.retries_within,
                optimize=True,
            )

    with shown(level="warning" if args.quiet else None):
        asyncio.run(work())


def _run_command(args: argparse.Namespace) -> int:
    from lineshaft.agent.agent import Agent  # noqa: PLC0415 - slow to import
    from lineshaft.agent.exec import Command, UnixAccount, read_variables  # noqa: PLC0415

    arguments = _arguments(args.command, shell=args.shell)
    files = {name: file for name, file in args.accounts if file is not None}
    for file in files.values():
        # A mistake shows at once, not with the first task.
        read_variables(file)
    agent = Agent(
        args.id,
        instance=args.instance,
        version=args.version,
        type="command",
        capabilities=args.capabilities,
        models=args.models,
        accounts=[name for name, _ in args.accounts],
        max_concurrent_tasks=args.slots,
        budget_usd=args.budget,
        heartbeat_interval_sec=args.heartbeat,
        grace_sec=args.grace,
    )
    command = Command(
        arguments,
        pass_env=args.pass_env,
        account=None if args.run_as is None else UnixAccount.find(args.run_as),
        time_limit_sec=args.time_limit,
        kill_after_sec=args.kill_after,
        retry_later_sec=args.retry_later,
        output=args.output,
        account_files=files,
    )
    with command:
        for name in dict.fromkeys(args.types):
            agent.task(name)(command)
        _run([agent], args, before=lambda: _explain(args))
    return 0


def _explain(args: argparse.Namespace) -> None:
    """What the command can see of this machine."""
    log = logging.getLogger("lineshaft.agent")
    home = Settings.load().home
    if args.run_as is None and is_readable(home):
        log.warning(
            "The command can read the token in %s, and call the server with it. Run it under an account of "
            "its own: --run-as USER.",
            path_of(home),
        )
    passed = ", ".join(sorted(child_environment(os.environ, args.pass_env))) or "nothing"
    account = "" if args.run_as is None else f", under the account {args.run_as}"
    log.info("commands get of this environment: %s%s", passed, account)
