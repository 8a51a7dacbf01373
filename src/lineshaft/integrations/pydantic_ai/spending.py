"""What runs of agents cost, booked with the task: calls of models in their steps, and agents in tools.

An agent that a tool calls with `usage=ctx.usage` adds to the usage of the run. If it has LineshaftDurability
too, its calls are steps and book themselves. If not, the difference between the usage and what was booked is
booked at the end of the tool's step.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

from pydantic_ai.durable_exec import JSON_CODEC
from pydantic_ai.messages import ModelResponse
from pydantic_ai.tools import RunContext
from pydantic_ai.usage import RunUsage

from lineshaft.agent.execution import Execution
from lineshaft.integrations.llm.client import LLMClient

_log = logging.getLogger("lineshaft.agent")
_ZERO = Decimal(0)


class _Known:
    """The part of a run's usage that is booked, by this attempt or an earlier one."""

    __slots__ = ("cost", "tokens_input", "tokens_output")

    def __init__(self, usage: RunUsage) -> None:
        # What came with the usage was spent before this run.
        self.cost = usage.cost or _ZERO
        self.tokens_input, self.tokens_output = usage.input_tokens, usage.output_tokens

    def add(self, cost: Decimal | None, tokens_input: int, tokens_output: int) -> None:
        self.cost += cost or _ZERO
        self.tokens_input += tokens_input
        self.tokens_output += tokens_output


#: By the usage's identity, for all agents of a handler; the usage is kept, so that no other one gets it.
_known: "WeakKeyDictionary[Execution, dict[int, tuple[RunUsage, _Known]]]" = WeakKeyDictionary()


class Spending:
    def __init__(self, client: LLMClient) -> None:
        self._client = client
        self._unpriced: set[str] = set()

    def booked(self, execution: Execution, payload: Any) -> Any:
        """Book a response, as JSON, in the step that runs; returns it with its cost."""
        response: ModelResponse = JSON_CODEC.load(ModelResponse, payload)
        cost = self._client.cost(response)
        if cost is None:
            self._warn(response.model_name or "?")
        usage = response.usage
        execution.spend(cost, usage.input_tokens, usage.output_tokens)
        usage.cost = cost
        return JSON_CODEC.dump(ModelResponse, response)

    def known(self, execution: Execution, run: RunContext[Any] | None, payload: Any) -> None:
        """A response, new or recorded, is about to be added to the usage of its run."""
        if run is not None:
            usage = JSON_CODEC.load(ModelResponse, payload).usage
            self._of(execution, run.usage).add(usage.cost, usage.input_tokens, usage.output_tokens)

    @contextmanager
    def of_tool(self, execution: Execution, run: RunContext[Any] | None) -> Iterator[None]:
        """Book what others spend while a tool's step runs, and add to the run's usage."""
        if run is not None:
            self._of(execution, run.usage)
        try:
            yield
        finally:
            if run is not None:
                self._book_rest(execution, run.usage)

    def _book_rest(self, execution: Execution, usage: RunUsage) -> None:
        known = self._of(execution, usage)
        cost = max((usage.cost or _ZERO) - known.cost, _ZERO)
        tokens_input = max(usage.input_tokens - known.tokens_input, 0)
        tokens_output = max(usage.output_tokens - known.tokens_output, 0)
        if cost or tokens_input or tokens_output:
            execution.spend(cost or None, tokens_input, tokens_output)
            known.add(cost, tokens_input, tokens_output)

    def _of(self, execution: Execution, usage: RunUsage) -> _Known:
        return _known.setdefault(execution, {}).setdefault(id(usage), (usage, _Known(usage)))[1]

    def _warn(self, model: str) -> None:
        if model not in self._unpriced:
            self._unpriced.add(model)
            _log.warning(
                "The price of the model %s is unknown: its calls are recorded without a cost, and no budget "
                "limits them. Set its price in the file that LINESHAFT_LLM_PRICES names.",
                model,
            )
