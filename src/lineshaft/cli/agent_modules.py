"""`lineshaft agent MODULE:AGENT`: finds agents in the modules of people."""

import importlib
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from lineshaft.agent.agent import Agent
from lineshaft.agent.outcome import describe
from lineshaft.agent.program import importing
from lineshaft.agent.task_type import TaskType
from lineshaft.cli.usage import UsageError
from lineshaft.errors import LineshaftError
from lineshaft.tracebacks import user_traceback


def load_agents(references: Sequence[str]) -> list[Agent]:
    """The agents that `package.module:attribute` names, each once."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return list(dict.fromkeys(_load(reference) for reference in references))


def load_tools(reference: str) -> list[Any]:
    """The functions and toolsets that `package.module:attribute` names: one, or a list of them."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    name, colon, attribute = reference.partition(":")
    if not (name and colon and attribute) or "/" in name:
        raise UsageError(f"--tools {reference!r} must be MODULE:TOOLS, such as app:tools or app:search.")
    module = _imported(name)
    try:
        tools: Any = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise UsageError(f"--tools: {_shown(module)} has no {attribute!r}.") from None
    found = list(tools) if isinstance(tools, list | tuple) else [tools]
    for tool in found:
        if not (callable(tool) and not isinstance(tool, type)) and not hasattr(tool, "call_tool"):
            raise UsageError(
                f"--tools {reference} has a {type(tool).__name__}. Tools are functions and toolsets of "
                "pydantic-ai, or a list of them."
            )
    return found


def _load(reference: str) -> Agent:
    name, colon, attribute = reference.partition(":")
    if name.endswith(".py") and "/" not in name:
        raise UsageError(f"{reference!r} names a file. Name the module: {name[:-3]}:{attribute or 'AGENT'}.")
    if not name or "/" in name:
        raise UsageError(f"{reference!r} must be MODULE:AGENT, such as app:agent or package.module:agent.")
    module = _imported(name)
    if not colon or not attribute:
        raise UsageError(f"{reference!r} must be MODULE:AGENT. {_choices(module)}")
    try:
        found: Any = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise UsageError(f"{_shown(module)} has no {attribute!r}. {_choices(module)}") from None
    if not isinstance(found, Agent):
        kind = (
            f"the handler of {found.name!r}"
            if isinstance(found, TaskType)
            else f"of type {type(found).__name__}"
        )
        raise UsageError(f"{reference} is {kind}, not an Agent. {_choices(module)}")
    if not found.task_types:
        raise LineshaftError(
            f"{reference} has no handlers. Give it one: @{attribute}.task('TYPE') before a function."
        )
    return found


def _imported(name: str) -> ModuleType:
    try:
        with importing(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from None
        raise UsageError(
            f"Module {error.name!r} was not found in {Path.cwd()} or among the installed packages. Run this "
            "in the folder that has it, or set PYTHONPATH."
        ) from None
    except LineshaftError:
        raise
    except Exception as error:  # noqa: BLE001 - the module's own fault
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> LineshaftError:
    print(user_traceback(error), end="", file=sys.stderr)
    return LineshaftError(f"Module {name!r} can't be imported: {describe(error)}")


def _shown(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return module.__name__ if file is None else Path(file).name


def _choices(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Agent)]
    if not names:
        return f"{_shown(module)} has no Agent."
    return f"{_shown(module)} has: {', '.join(names)}."
