"""Authentication of callers, and their scopes."""

import ipaddress
from dataclasses import dataclass
from decimal import Decimal

from lineshaft.engine.tokens import Tokens
from lineshaft.errors import ForbiddenError, SettingsError, UnauthorizedError
from lineshaft.types import Scope


@dataclass(frozen=True, slots=True)
class Principal:
    #: The token's id and name; None: no token was needed.
    token_id: str | None
    name: str
    scope: Scope
    #: The only agent that it may act as; None: any.
    agent_id: str | None = None
    #: The budget of that agent, in place of what it declares; None: as it declares.
    agent_budget_usd: Decimal | None = None

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


#: A caller on loopback has an account on this machine and could read the database's files.
LOCAL_CALLER = Principal(None, "this machine", Scope.ADMIN)


class Authenticator:
    def __init__(self, tokens: Tokens, *, required: bool) -> None:
        self._tokens = tokens
        self._required = required

    async def principal(self, authorization: str | None) -> Principal:
        """The caller with this header. A token is checked even where none is needed."""
        if authorization is None:
            if self._required:
                raise UnauthorizedError(
                    "This server needs a token: send the header 'Authorization: Bearer TOKEN'. Create one: "
                    "lineshaft token create --name NAME --scope SCOPE"
                )
            return LOCAL_CALLER
        scheme, _, secret = authorization.partition(" ")
        token = await self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise UnauthorizedError(
                "The Authorization header has no valid token: it must be 'Bearer TOKEN' with a token that "
                "was not revoked. See 'lineshaft token list'."
            )
        return Principal(token.id, token.name, token.scope, token.agent_id, token.budget_usd)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def check_exposure(host: str, tokens: Tokens) -> None:
    """Refuse to listen beyond loopback while no token exists."""
    if not is_loopback(host) and not await tokens.exist():
        raise SettingsError(
            f"Asked to listen on {host}, where other machines can call, but there is no token yet. Create "
            "one first: lineshaft token create --name NAME --scope SCOPE. Or listen on 127.0.0.1."
        )
