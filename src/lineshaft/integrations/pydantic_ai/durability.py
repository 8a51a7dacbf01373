"""`LineshaftDurability`: makes the runs of an agent of pydantic-ai durable inside of a handler."""

from collections.abc import AsyncIterable, Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic_ai.agent import EventStreamHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationId,
    RoleBasedOperationConfig,
    conversation_id_from_run_id,
)
from pydantic_ai.exceptions import UsageLimitExceeded, UserError
from pydantic_ai.messages import (
    AgentStreamEvent,
    FunctionToolCallEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import Model, ModelResolutionContext
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import AgentDepsT, DeferredToolRequests, DeferredToolResults, RunContext
from pydantic_ai.toolsets import ToolsetTool

from lineshaft.agent.outcome import BudgetExceeded, Fail
from lineshaft.agent.steps import OnChange
from lineshaft.integrations.llm.client import LLMClient
from lineshaft.integrations.llm.configuration import LLMConfig
from lineshaft.integrations.pydantic_ai import approvals
from lineshaft.integrations.pydantic_ai.spending import Spending
from lineshaft.integrations.pydantic_ai.steps import (
    StepBackend,
    context_of,
    current_execution,
    run_id_of,
)
from lineshaft.model.retry import FailureCategory
from lineshaft.settings import Settings

#: The key of a tool's metadata that has its options: {"lineshaft": {"on_change": "rerun"}}.
TOOL_OPTIONS = "lineshaft"
#: The end of a text that is shown as progress.
_SHOWN = 500


def _cant_be_stored(error: Exception) -> Fail:
    return Fail(f"The result of a step can't be stored as JSON: {error}", FailureCategory.INVALID_OUTPUT)


class LineshaftDurability(BaseDurabilityCapability[AgentDepsT]):
    """Makes each call of a model, a function tool or an MCP tool a durable step of the task.

    A later attempt takes the recorded answers and results, and goes on with the first call that isn't
    recorded: nothing is asked, done or paid twice. Outside of a handler an agent with it runs as without it.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Lineshaft",
        durable_unit_noun="step",
        durable_container_noun="handler",
        codec=JSON_CODEC,
        serialization_failure=_cant_be_stored,
        wrapped_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        # The first step that needs an MCP server opens the session: if all are recorded, none does.
        toolset_lifecycles={
            "function": "enter-always",
            "mcp": "enter-in-durable-unit",
            "dynamic": "enter-never",
        },
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        tool_config_key=TOOL_OPTIONS,
    )

    def __init__(
        self,
        *,
        on_prompt_change: OnChange = "rerun",
        on_tool_change: OnChange = "refuse",
        progress: bool = False,
        models: Mapping[str, Model] | None = None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
        name: str | None = None,
        client: LLMClient | None = None,
    ) -> None:
        """`on_prompt_change`: what a later attempt does if it asks a model something else than was recorded.

        `on_tool_change` is the same for the arguments of a tool's call; a tool's metadata may say otherwise:
        `metadata={"lineshaft": {"on_change": "rerun"}}`. "refuse" fails the attempt as `step_mismatch`,
        "rerun" makes the call again, "reuse" takes the recorded result.

        `progress`: models' answers are streamed, and shown as the task's progress. `models` are instances
        that runs choose by these names. `event_stream_handler` gets the events of runs, also those of
        recorded steps again; with it, `progress` does nothing. `name` is used in the names of steps, by
        default the agent's. `client`: by default that of the settings.
        """
        shown: Any = _show_progress if progress else None
        super().__init__(models=models, event_stream_handler=event_stream_handler or shown, name=name)
        self._config: RoleBasedOperationConfig[OnChange] = RoleBasedOperationConfig(
            model=on_prompt_change,
            event="reuse",
            capability="reuse",
            tool=on_tool_change,
            resolve_tool=self._of_tool,
        )
        self._on_tool_change: OnChange = on_tool_change
        self._client = client or LLMClient(LLMConfig.from_settings(Settings.load()))
        self._spending = Spending(self._client)

    def _of_tool(self, _: DurableOperationId, tool: object | None, name: str) -> OnChange | Literal[False]:
        metadata = tool.tool_def.metadata if isinstance(tool, ToolsetTool) else None
        options = (metadata or {}).get(TOOL_OPTIONS)
        if options is False:
            return False
        if options is None:
            return self._on_tool_change
        if not isinstance(options, Mapping) or options.keys() != {"on_change"}:
            raise UserError(
                f"The metadata {TOOL_OPTIONS!r} of the tool {name!r} must be {{'on_change': 'refuse', "
                f"'rerun' or 'reuse'}}, or False for a tool that isn't a step; got {options!r}."
            )
        on_change: OnChange = options["on_change"]
        return on_change

    # What pydantic-ai asks of an engine.

    @property
    def in_durable_context(self) -> bool:
        return current_execution() is not None

    @cached_property
    def _backend(self) -> StepBackend:
        return StepBackend(self.name, self._config, self._spending)

    def get_durable_operation_backend(self) -> StepBackend:
        return self._backend

    def get_default_run_id(self) -> str | None:
        execution = current_execution()
        return None if execution is None else run_id_of(execution, self.name)

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def resolve_model_id(
        self, ctx: ModelResolutionContext[AgentDepsT], *, model_id: str
    ) -> Model | None:
        """Named models are made by Lineshaft's client: it doesn't retry, and knows the operator's prices."""
        registered = await super().resolve_model_id(ctx, model_id=model_id)
        if registered is not None or model_id == "test":
            return registered
        return self._client.model(model_id)

    async def on_run_error(self, ctx: RunContext[AgentDepsT], *, error: BaseException) -> AgentRunResult[Any]:
        """Raise errors of models as ours, which say when to try again."""
        if self.in_durable_context:
            if isinstance(error, UsageLimitExceeded):
                raise BudgetExceeded(str(error)) from None
            if (ours := self._client.translated(error)) is not None:
                # The provider's own error may quote a key.
                raise ours from None
        return await super().on_run_error(ctx, error=error)

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[AgentDepsT], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Tools that need an approval, or are executed elsewhere, wait as tasks for a person."""
        execution = current_execution()
        return None if execution is None else await approvals.resolved(execution, ctx, requests)


async def _show_progress(_: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
    """Show what a model writes, and which tools it calls, as the progress of the task."""
    execution = current_execution()
    text = ""
    async for event in events:
        if execution is None:
            continue
        match event:
            case (
                PartStartEvent(part=TextPart(content=content))
                | PartDeltaEvent(delta=TextPartDelta(content_delta=content))
            ):
                text += content
                context_of(execution).progress({"characters": len(text), "text": text[-_SHOWN:]})
            case FunctionToolCallEvent(part=call):
                context_of(execution).progress({"tool": call.tool_name})
