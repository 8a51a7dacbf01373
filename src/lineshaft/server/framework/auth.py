"""Who calls, and what they may do."""

import ipaddress
from dataclasses import dataclass

from lineshaft.engine.tokens import Tokens
from lineshaft.errors import ForbiddenError, SettingsError, UnauthorizedError
from lineshaft.types import Scope


@dataclass(frozen=True, slots=True)
class Principal:
    #: The token's id and name; None: no token was needed.
    token_id: str | None
    name: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        return self.scope.includes(scope)

    def check(self, scope: Scope) -> None:
        if not self.may(scope):
            raise ForbiddenError(
                f"This needs a token with the scope {scope} or more; {self.name!r} has {self.scope}. Make "
                f"one: lineshaft token create --name NAME --scope {scope}"
            )


#: Whoever reaches a loopback address has an account on this machine, and could read the database's files.
NEIGHBOUR = Principal(None, "this machine", Scope.ADMIN)


class Authenticator:
    def __init__(self, tokens: Tokens, *, required: bool) -> None:
        self._tokens = tokens
        self._required = required

    async def principal(self, authorization: str | None) -> Principal:
        """Whose the header is. A token that is given counts also where none is needed."""
        if authorization is None:
            if self._required:
                raise UnauthorizedError(
                    "This server wants a token: send the header 'Authorization: Bearer TOKEN'. Make one: "
                    "lineshaft token create --name NAME --scope SCOPE"
                )
            return NEIGHBOUR
        scheme, _, secret = authorization.partition(" ")
        token = await self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise UnauthorizedError(
                "The Authorization header has no token in force: it must be 'Bearer TOKEN' with a token that "
                "was not revoked. See 'lineshaft token list'."
            )
        return Principal(token.id, token.name, Scope(token.scope))


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def check_exposure(host: str, tokens: Tokens) -> None:
    """Refuse to listen where others can call while nobody could have a token."""
    if not is_loopback(host) and not await tokens.exist():
        raise SettingsError(
            f"Asked to listen on {host}, where other machines can call, but there is no token yet. Make "
            "one first: lineshaft token create --name NAME --scope SCOPE. Or listen on 127.0.0.1."
        )
