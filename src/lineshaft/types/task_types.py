"""Task types: the defaults of their tasks, and who serves them."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from msgspec import Struct


class DefaultsOfType(Struct, frozen=True, kw_only=True):
    """What applies to tasks that leave it out; None: there is no default. The last three are for people."""

    max_cost_usd: Decimal | None = None
    max_attempts: int | None = None
    max_duration_sec: float | None = None
    #: The fields of a retry policy that are set.
    retry: dict[str, Any] | None = None
    parameters_schema: dict[str, Any] | None = None
    result_schema: dict[str, Any] | None = None
    description: str | None = None


class TypeInfo(Struct, frozen=True, kw_only=True):
    type: str
    defaults: DefaultsOfType
    #: Where each of them comes from: `agent:ID`, or `hand` if a person has set it.
    origins: dict[str, str]
    #: Agents with a live instance that names the type.
    agents: list[str]
    #: Where agents differ, so that the stricter value applies; and agents with a budget that have claimed
    #: tasks of this type which reserve nothing of it.
    warnings: list[str]


class UncappedClaim(Struct, frozen=True):
    """An agent with a budget claimed tasks of this type, which reserve nothing of it."""

    agent_id: str
    type: str
    first_at: datetime

    def __str__(self) -> str:
        return (
            f"Agent {self.agent_id!r} has a budget, but claimed a task of type {self.type!r} without "
            "max_cost_usd: it reserves nothing, so tasks that run at the same time can spend more than the "
            f"budget. Set a limit: lineshaft types set {self.type} --max-cost USD, or lineshaft limits set "
            "--default-max-cost USD"
        )
