"""Calls of models and tools as durable steps of the task: their names, and when a recorded one counts.

A name must be the same in each attempt. So a model's call has its number in the run; calls of tools run at
the same time and are named by the id that the model gave them. A run has the name of its agent, and a number
if there are several, in the order in which they begin; inside of a tool, the tool's step comes first. A
handler whose runs begin in another order each time gives them a `run_id`.
"""

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from pydantic_ai.durable_exec import (
    CallableOperationBackend,
    DurableOperationId,
    EventStreamHandlerId,
    JournalOperationNamer,
    ModelRequestId,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    ToolsetValidateToolArgumentsId,
)
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import RunContext

from lineshaft.agent.context import TaskContext
from lineshaft.agent.execution import Execution, current
from lineshaft.agent.steps import MAX_NAME, OnChange, running_step
from lineshaft.errors import LineshaftError
from lineshaft.integrations.pydantic_ai.spending import Spending

#: In messages, but different in each attempt without a difference in what is asked.
_VOLATILE = frozenset({"timestamp", "run_id", "conversation_id", "metadata"})
_DIGEST_LENGTH = 32

_counters: "WeakKeyDictionary[Execution, Counter[str]]" = WeakKeyDictionary()
_contexts: "WeakKeyDictionary[Execution, TaskContext]" = WeakKeyDictionary()


def current_execution() -> Execution | None:
    """The execution whose handler runs here; raises LineshaftError in a handler that isn't async."""
    execution = current.get()
    if execution is not None and not execution.handler.is_async:
        raise LineshaftError(
            f"The handler of {execution.task.type!r} runs an agent with LineshaftDurability, and isn't "
            "async: its steps can't be recorded. Make it 'async def', and await agent.run()."
        )
    return execution


def context_of(execution: Execution) -> TaskContext:
    if execution not in _contexts:
        _contexts[execution] = TaskContext(execution)
    return _contexts[execution]


def occurrence(execution: Execution, name: str) -> str:
    """A name that is unique in this attempt, and the same in the next one."""
    counters = _counters.setdefault(execution, Counter())
    counters[name] += 1
    return name if counters[name] == 1 else f"{name}#{counters[name]}"


class StepBackend(CallableOperationBackend[OnChange]):
    def __init__(
        self, agent_name: str, config: "RoleBasedOperationConfig[OnChange]", spending: Spending
    ) -> None:
        super().__init__(namer=JournalOperationNamer(agent_name), config=config)
        self._prefix = f"{agent_name}__"
        self._spending = spending

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: OnChange,
    ) -> object:
        execution = current_execution()
        if execution is None or isinstance(operation_id, EventStreamHandlerId):
            # Events are shown and have no result: a step for each would only be slow.
            return await body()
        run = next((part for part in cache_key if isinstance(part, RunContext)), None)
        key: object = None
        match operation_id:
            case ModelRequestId():
                unit, key = "model", _prompt_digest(cache_key)
            case ToolsetCallToolId() | ToolsetValidateToolArgumentsId():
                tool, arguments = cache_key[0], cache_key[1]
                what = "" if isinstance(operation_id, ToolsetCallToolId) else ":validate"
                unit, key = f"{tool}:{run.tool_call_id if run else ''}{what}", [tool, arguments]
            case _:
                unit = name.removeprefix(self._prefix)
        prefix = (
            ""
            if run is None or run.run_id is None
            else run.run_id.removeprefix(f"{execution.task.id}:") + "/"
        )
        step = _short(occurrence(execution, prefix + unit))

        async def work() -> Any:
            if unit == "model":
                return self._spending.booked(execution, await body())
            with self._spending.of_tool(execution, run):
                return await body()

        result = await context_of(execution).step(step, work, key=key, on_change=config)
        if unit == "model":
            self._spending.known(execution, run, result)
        return result


def run_id_of(execution: Execution, agent_name: str) -> str:
    """An id for a run of an agent that begins now: the same in each attempt."""
    within = running_step(execution.task.id)
    return f"{execution.task.id}:{occurrence(execution, f'{within}/{agent_name}' if within else agent_name)}"


def _short(name: str) -> str:
    """A name within the limit: runs may be inside of tools of runs."""
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - _DIGEST_LENGTH - 1]}~{_digest(name.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]


def _prompt_digest(cache_key: tuple[object, ...]) -> str:
    """What a model is asked: messages, tools and the form of the output; not which model, or its settings.

    A task may go on with a fallback model, and doesn't pay again for the answers that it has.
    """
    asked: list[Any] = []
    for part in cache_key:
        if isinstance(part, list):
            messages: list[ModelMessage] = part
            asked.append(_stable(ModelMessagesTypeAdapter.dump_python(messages, mode="json")))
        elif isinstance(part, ModelRequestParameters):
            tools = [*part.function_tools, *part.output_tools]
            asked.append([[tool.name, tool.description, tool.parameters_json_schema] for tool in tools])
            form = part.output_object
            asked.append([part.output_mode, None if form is None else form.json_schema])
    return _digest(msgspec.json.encode(asked, order="sorted"))


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(part) for name, part in value.items() if name not in _VOLATILE}
    if isinstance(value, list):
        return [_stable(part) for part in value]
    return value
