"""Agents and their instances: what a process declares when it registers, and what callers read."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct

from lineshaft.model.accounts import MAX_ACCOUNTS
from lineshaft.model.type_defaults import TypeDefaults
from lineshaft.types.features import Needs
from lineshaft.types.request import Name, Request

MAX_VERSION = 200
#: Characters of the name of an instance or a machine.
MAX_INSTANCE = 300
_Names = Annotated[tuple[Name, ...], Meta(max_length=1000)]
_InstanceName = Annotated[str, Meta(max_length=MAX_INSTANCE)]
#: Instances whose end one call may report.
MAX_GONE = 1_000
InstanceNames = Annotated[tuple[_InstanceName, ...], Meta(max_length=MAX_GONE)]
Incarnation = Annotated[int, Meta(ge=0, le=2**62)]


class NewAgent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    #: Names the process; registering the same name again supersedes the process that had it.
    instance: _InstanceName = ""
    #: The machine that the process runs on.
    host: _InstanceName | None = None
    #: Instances of this agent on the same host whose processes are known to be dead.
    gone: InstanceNames = ()
    type: Name | None = None
    capabilities: _Names = ()
    #: None: every type that matches its capabilities.
    types: _Names | None = None
    models_available: _Names = ()
    #: Accounts with providers. Each claim uses one that is open; without an open one it gets nothing.
    accounts: Annotated[tuple[Name, ...], Meta(max_length=MAX_ACCOUNTS), Needs("accounts")] = ()
    #: The version of the program that it runs; recorded with each attempt.
    version: Annotated[str, Meta(min_length=1, max_length=MAX_VERSION)] | None = None
    max_concurrent_tasks: int = 3
    budget_usd: Decimal | float | None = None
    poll_interval_sec: float = 5.0
    claim_ttl_sec: float = 60.0
    heartbeat_interval_sec: float = 30.0
    #: Defaults of tasks by type, for types that it serves.
    task_defaults: Annotated[dict[str, TypeDefaults], Meta(max_length=1000), Needs("task_defaults")] = {}


class InstanceInfo(Struct, frozen=True, kw_only=True):
    """One process of an agent."""

    #: Its name; empty if it registered without one.
    instance: str
    incarnation: int
    host: str | None
    #: The version of the program that it runs; None: not declared.
    version: str | None
    #: active, draining or offline.
    status: str
    started_at: datetime
    last_heartbeat: datetime
    capabilities: list[str]
    #: None: every type that matches its capabilities.
    types: list[str] | None
    models_available: list[str]
    max_concurrent_tasks: int
    current_tasks: int
    task_ids: list[str]
    poll_interval_sec: float
    claim_ttl_sec: float
    heartbeat_interval_sec: float


class AgentAccount(Struct, frozen=True):
    """An account with a provider that instances of an agent offer."""

    name: str
    #: Claims use it.
    open: bool
    #: When it opens again; None: it is open, or that is not known.
    until: datetime | None = None


class AgentInfo(Struct, frozen=True, kw_only=True):
    """An agent: a role that any number of processes may have at the same time.

    Capabilities, types and models are those of all its live instances together, slots and tasks are sums. Of
    an agent without a live instance they are those of the last one.
    """

    id: str
    type: str | None
    capabilities: list[str]
    #: None: every type that matches its capabilities.
    types: list[str] | None
    models_available: list[str]
    accounts: list[AgentAccount] = []
    #: What the newest instance declares.
    version: str | None = None
    max_concurrent_tasks: int
    current_tasks: int
    #: None: unlimited.
    budget_usd: Decimal | None
    budget_remaining_usd: Decimal | None
    spent_usd: Decimal
    reserved_usd: Decimal
    #: active, draining or offline; set by hand, otherwise active while one of its instances is.
    status: str
    #: The last one of any instance; None: no instance is known any more.
    last_heartbeat: datetime | None
    poll_interval_sec: float
    claim_ttl_sec: float
    heartbeat_interval_sec: float
    #: The newest instance.
    incarnation: int
    registered_at: datetime
    #: The newest first. Of those that are offline, only the newest.
    instances: list[InstanceInfo] = []


class RegisteredAgent(AgentInfo, frozen=True, kw_only=True):
    """The answer to a registration. `incarnation` is the caller's, and `instances` has only that one."""

    #: What was declared but doesn't count, and the command that changes it.
    warnings: list[str] = []
    #: Optional fields of requests that the server understands; a client leaves out the others.
    features: list[str] = []

    @property
    def own(self) -> InstanceInfo:
        """The instance that was registered."""
        (own,) = self.instances
        return own


class AgentInstance(Request, frozen=True, kw_only=True):
    incarnation: Incarnation


class Siblings(AgentInstance, frozen=True, kw_only=True):
    #: Instances of the same agent and host whose processes are known to be dead.
    gone: InstanceNames = ()
    #: Name all instances on the same host, not only some to watch.
    everyone: bool = False


class SiblingNames(Struct, frozen=True):
    #: Instances of the same agent and host, for the caller to watch.
    instances: list[str]
