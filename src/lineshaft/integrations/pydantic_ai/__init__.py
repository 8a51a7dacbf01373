"""Agents of pydantic-ai that continue where they were killed: `LineshaftDurability` (`durability.py`).

`PromptAgent` (`prompt_agent.py`) is a handler on top of it that does a task by asking a model.

    writer = Agent("openai:gpt-5-mini", name="writer", capabilities=[LineshaftDurability()])

    @agent.task()
    async def write(topic: str) -> str:
        return (await writer.run(topic)).output

Each call of a model or a tool is a durable step (`steps.py`). What models cost is booked with it
(`spending.py`), and tools that need a person wait as tasks for one, without a slot (`approvals.py`).

This room builds on `lineshaft.agent` and `integrations/llm`, and on what pydantic-ai has for engines of
durable execution (`pydantic_ai.durable_exec`). It needs the extra `llm`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineshaft.integrations.pydantic_ai.durability import LineshaftDurability
    from lineshaft.integrations.pydantic_ai.prompt_agent import PromptAgent

__all__ = ["LineshaftDurability", "PromptAgent"]
_MODULES = {"LineshaftDurability": "durability", "PromptAgent": "prompt_agent"}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a name when it is used first, and say what to install if it needs that."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lineshaft.integrations.llm.configuration import check_installed  # noqa: PLC0415

        check_installed(name)
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
