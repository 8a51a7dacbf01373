"""`PromptAgent`: a handler that lets a language model do the task."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
from pydantic_ai import Agent as Model
from pydantic_ai.exceptions import (
    AgentRunError,
    ApprovalRequired,
    CallDeferred,
    ModelRetry,
    ToolFailed,
)
from pydantic_ai.tools import RunContext
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset, ToolsetTool

from lineshaft.agent.context import TaskContext
from lineshaft.agent.outcome import AttemptCancelled, Cancel, Fail, Snooze, describe
from lineshaft.checks import json_schema
from lineshaft.checks.verdict import CandidateOutput, NoVerdict
from lineshaft.errors import LineshaftError
from lineshaft.integrations.llm.client import LLMClient, json_in
from lineshaft.integrations.llm.secrets import without_secrets
from lineshaft.integrations.pydantic_ai.durability import LineshaftDurability
from lineshaft.integrations.pydantic_ai.prompts import (
    INSTRUCTIONS,
    Form,
    form_of,
    prompt_of,
    refusals_of,
)
from lineshaft.settings import Settings

#: What a task's model is asked again within one attempt if its answer doesn't fit.
_RETRIES = 2
_NAME = "prompt"
_SHOWN_TOOL_ERROR = 2_000

#: What the run in this context has to answer.
_wanted: ContextVar[tuple[TaskContext, Form]] = ContextVar("lineshaft_form")

Tool = Callable[..., Any] | AbstractToolset[TaskContext]


class PromptAgent:
    """Lets a language model do tasks: prompt, inputs and artifacts in; text, or JSON that fits, out.

        agent = Agent("researcher", models=["openai:gpt-5-mini"])
        agent.task("research")(PromptAgent("openai:gpt-5-mini", tools=[search]))

    Its calls of models and tools are durable steps (`LineshaftDurability`).
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        instructions: str = "",
        tools: Sequence[Tool] = (),
        fallback_models: Sequence[str] | None = None,
        client: LLMClient | None = None,
    ) -> None:
        """`model`: for tasks that don't choose one; by default LINESHAFT_LLM_MODEL with its fallback models.

        `tools` are functions and toolsets of pydantic-ai. A function may take a `RunContext[TaskContext]`
        first, whose `deps` is the task's context. The model sees what a function raises, except the
        wishes of handlers (`Fail`, `Snooze`, …). `instructions` are added to those of Lineshaft.
        """
        self._client = client or LLMClient.from_settings(Settings.load())
        self._model, self._fallback_models = model, fallback_models
        functions = [tool for tool in tools if not isinstance(tool, AbstractToolset)]
        toolsets = [tool for tool in tools if isinstance(tool, AbstractToolset)]
        if functions:
            toolsets.append(_Functions(functions, id="tools"))
        self._agent: Model[TaskContext, str] = Model(
            self._client.model(model, fallback_models=fallback_models),
            name=_NAME,
            deps_type=TaskContext,
            instructions=f"{INSTRUCTIONS}\n\n{instructions}".strip(),
            toolsets=toolsets,
            retries={"output": _RETRIES},
            capabilities=[LineshaftDurability(progress=True, client=self._client)],
        )
        self._agent.output_validator(_checked)

    async def __call__(self, ctx: TaskContext, **_: Any) -> Any:
        refusals = refusals_of(ctx)
        form = await form_of(ctx)
        _wanted.set((ctx, form))
        prompt = await prompt_of(ctx, form, refusals)
        # A refused answer leads to another conversation, whose steps have names of their own.
        run_id = f"{ctx.id}:{_NAME}" + (f"-{len(refusals) + 1}" if refusals else "")
        result = await self._agent.run(prompt, deps=ctx, run_id=run_id, model=ctx.model)
        return json_in(result.output) if form.is_json else result.output


async def _checked(_: RunContext[TaskContext], output: str) -> str:
    """Have an answer that doesn't fit corrected, as long as there are tries left."""
    ctx, form = _wanted.get()
    if not form.is_json:
        return output
    try:
        data = json_in(output)
    except ValueError:
        raise ModelRetry("The answer must be one JSON value, and nothing else.") from None
    if form.schema is None:
        return output
    candidate = CandidateOutput(
        ctx.id, ctx.epoch, ctx.type, ctx.title, b"{}", msgspec.json.encode({"data": data})
    )
    try:
        verdict = await asyncio.to_thread(json_schema.check, form.schema, candidate)
    except NoVerdict:
        return output  # the gate decides
    if not verdict.passed:
        reasons = "\n".join(f"- {reason}" for reason in verdict.reasons)
        raise ModelRetry(f"The answer doesn't fit the JSON schema:\n{reasons}")
    return output


#: What a tool raises on purpose: for the run, or for the task.
_PASSED = (
    AgentRunError,
    ApprovalRequired,
    AttemptCancelled,
    CallDeferred,
    Cancel,
    Fail,
    LineshaftError,
    ModelRetry,
    Snooze,
    ToolFailed,
)


class _Functions(FunctionToolset[TaskContext]):
    """Functions as tools: the model sees what one raises, and may do without it."""

    async def call_tool(
        self,
        name: str,
        tool_args: dict[str, Any],
        ctx: RunContext[TaskContext],
        tool: ToolsetTool[TaskContext],
    ) -> Any:
        try:
            return await super().call_tool(name, tool_args, ctx, tool)
        except _PASSED:
            raise
        except Exception as error:
            said = without_secrets(describe(error))[:_SHOWN_TOOL_ERROR]
            raise ToolFailed(f"The tool {name} failed: {said}") from error
