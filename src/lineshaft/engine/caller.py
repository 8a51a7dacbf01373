"""Who calls: one object for each call, which its entry point sets.

A server sets it for each request, the dashboard for each page and action, the client on a database for each
act by hand. Whatever depends on the caller (rights, names that are recorded, the connections that a call may
use) asks `caller()`. This module imports nothing of the engine, so that every room may use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lineshaft.errors import ForbiddenError
from lineshaft.types.tokens import Scope


class Caller(Struct, frozen=True):
    #: The id of its token; None: it has none, and needed none.
    token_id: str | None = None
    #: The name of its token.
    name: str = "this machine"
    scope: Scope = Scope.ADMIN
    #: The only agent that it may act as; None: any.
    agent_id: str | None = None
    #: The budget of that agent, in place of what it declares; None: as it declares.
    agent_budget_usd: Decimal | None = None
    #: The name that events of acts by hand have; None: unknown, or no person acts.
    actor: str | None = None
    #: Callers of this server need a token; without one, those on loopback are trusted.
    needs_token: bool = False
    #: The call only reads. Many readers then don't delay those who write.
    only_reads: bool = False
    #: The call changes nothing, so that nothing is in doubt if it fails: its caller learns within seconds
    #: that the database doesn't answer.
    fails_soon: bool = False

    @property
    def token(self) -> str | None:
        """The name of the token, as tasks and DAGs record it; None: the call has none, or isn't over HTTP."""
        return None if self.token_id is None else self.name

    def may(self, scope: Scope) -> bool:
        return self.scope.includes(scope)

    def check(self, scope: Scope) -> None:
        if not self.may(scope):
            raise ForbiddenError(
                f"This needs a token with the scope {scope} or higher; {self.name!r} has {self.scope}. "
                f"Create one: lineshaft token create --name NAME --scope {scope}"
            )

    def check_agent(self, agent_id: str) -> None:
        if self.agent_id not in {None, agent_id}:
            raise ForbiddenError(
                f"The token {self.name!r} is bound to agent {self.agent_id!r} and can't act as agent "
                f"{agent_id!r}. Use a token of that agent: lineshaft token create --scope agent --agent ID"
            )

    def check_creator(self, created_by: str | None) -> None:
        if self.agent_id is not None and created_by not in {None, f"agent:{self.agent_id}"}:
            raise ForbiddenError(
                f"The token {self.name!r} is bound to agent {self.agent_id!r} and can't submit with "
                f"created_by {created_by!r}. Leave it out, or send 'agent:{self.agent_id}'."
            )


#: A program on this machine, with an account that reaches the database or a server that trusts it.
LOCAL_CALLER = Caller()

_current: ContextVar[Caller] = ContextVar("caller", default=LOCAL_CALLER)
#: Who calls.
caller = _current.get
#: Set who calls, until the end of the current context.
set_caller = _current.set


@contextmanager
def calling(**changes: Any) -> Iterator[None]:
    """Change fields of the caller within the block."""
    before = _current.set(replace(_current.get(), **changes))
    try:
        yield
    finally:
        _current.reset(before)
