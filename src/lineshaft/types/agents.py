"""Agents: what one declares when it registers, and what callers read."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct

_Name = Annotated[str, Meta(min_length=1, max_length=1000)]
MAX_VERSION = 200
_Names = Annotated[tuple[_Name, ...], Meta(max_length=1000)]


class NewAgent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    type: _Name | None = None
    capabilities: _Names = ()
    #: None: every type that matches its capabilities.
    types: _Names | None = None
    models_available: _Names = ()
    #: Of the program that it runs; recorded with each attempt.
    version: Annotated[str, Meta(min_length=1, max_length=MAX_VERSION)] | None = None
    max_concurrent_tasks: int = 3
    budget_usd: Decimal | float | None = None
    poll_interval_sec: float = 5.0
    claim_ttl_sec: float = 60.0
    heartbeat_interval_sec: float = 30.0


class AgentInfo(Struct, frozen=True, kw_only=True):
    id: str
    type: str | None
    capabilities: list[str]
    #: None: every type that matches its capabilities.
    types: list[str] | None
    models_available: list[str]
    #: Of the program that it runs; None: not declared.
    version: str | None = None
    max_concurrent_tasks: int
    current_tasks: int
    #: None: unlimited.
    budget_usd: Decimal | None
    budget_remaining_usd: Decimal | None
    spent_usd: Decimal
    reserved_usd: Decimal
    #: active, draining or offline.
    status: str
    last_heartbeat: datetime
    poll_interval_sec: float
    claim_ttl_sec: float
    heartbeat_interval_sec: float
    incarnation: int
    registered_at: datetime


class RegisteredAgent(AgentInfo, frozen=True, kw_only=True):
    """The answer to a registration."""

    #: What was declared but doesn't count, and the command that changes it.
    warnings: list[str] = []
