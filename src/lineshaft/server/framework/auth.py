"""Authentication of callers, and their scopes."""

import ipaddress
import math
import time
from decimal import Decimal

from msgspec import Struct
from starlette.datastructures import Headers

from lineshaft.engine.tokens import Tokens
from lineshaft.errors import ForbiddenError, SettingsError, UnauthorizedError
from lineshaft.types import Scope


class Principal(Struct, frozen=True):
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

    def check_creator(self, created_by: str | None) -> None:
        if self.agent_id is not None and created_by not in {None, f"agent:{self.agent_id}"}:
            raise ForbiddenError(
                f"The token {self.name!r} is bound to agent {self.agent_id!r} and can't submit with "
                f"created_by {created_by!r}. Leave it out, or send 'agent:{self.agent_id}'."
            )


#: Trusted on loopback until the first token is created: it has an account on this machine.
LOCAL_CALLER = Principal(None, "this machine", Scope.ADMIN)
#: How long a server may take to notice that another process has created the first token. Asking the database
#: at every call would be a round trip more for each.
_NOTICE_SEC = 0.05
#: Headers that proxies add: the caller isn't on this machine.
_PROXY_HEADERS = frozenset({b"forwarded", b"x-real-ip", b"via"})
_PROXY_PREFIX = b"x-forwarded-"
#: Over HTTP that needs a token, too.
_CREATE_ONE = (
    "Create one on the server's machine, with LINESHAFT_URL unset: "
    "lineshaft token create --name NAME --scope SCOPE"
)


class Authenticator:
    """Finds the caller of a request.

    `auth` is the setting: with `auto`, callers without a token are trusted until the first token is created;
    with `off`, after that too.
    """

    def __init__(self, tokens: Tokens, *, auth: str, host: str) -> None:
        self._tokens = tokens
        self._off = auth == "off"
        #: Once True, it stays so: revoking the last token opens nothing.
        self.required = auth == "required" or not is_loopback(host)
        self._asked_at = -math.inf

    async def refresh(self) -> None:
        """Find out whether a token has been created; when the server starts, and as callers come."""
        now = time.monotonic()
        if self.required or self._off or now - self._asked_at < _NOTICE_SEC:
            return
        before, self._asked_at = self._asked_at, now
        try:
            if await self._tokens.ever_existed():
                self.required = True
        except BaseException:
            self._asked_at = before
            raise

    def notice_token(self) -> None:
        """A token has been created, as this server knows by itself."""
        self.required = not self._off or self.required

    async def principal(self, headers: Headers) -> Principal:
        """The caller with these headers. A token is checked even where none is needed."""
        authorization = headers.get("authorization")
        if authorization is None:
            await self.refresh()
            if self.required:
                raise UnauthorizedError(
                    f"This server needs a token: send the header 'Authorization: Bearer TOKEN'. {_CREATE_ONE}"
                )
            if (proxy := _proxy_header(headers)) is not None:
                raise UnauthorizedError(
                    f"The request came through a proxy (it has the header {proxy!r}), so its caller may be "
                    "on another machine and needs a token: send the header 'Authorization: Bearer TOKEN'. "
                    f"{_CREATE_ONE}"
                )
            return LOCAL_CALLER
        scheme, _, secret = authorization.partition(" ")
        token = await self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise UnauthorizedError(
                "The Authorization header has no valid token: it must be 'Bearer TOKEN' with a token that "
                "was not revoked. See 'lineshaft token list'."
            )
        self.notice_token()
        return Principal(token.id, token.name, token.scope, token.agent_id, token.budget_usd)


def _proxy_header(headers: Headers) -> str | None:
    """A header that only a proxy sends."""
    for name, _ in headers.raw:
        if name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIX):
            return name.decode("latin-1")
    return None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def check_exposure(host: str, auth: str, tokens: Tokens) -> None:
    """Refuse to listen beyond loopback while no token exists, or without tokens."""
    if is_loopback(host):
        return
    if auth == "off":
        raise SettingsError(
            f"Asked to listen on {host}, where other machines can call, with LINESHAFT_AUTH=off. Without "
            "tokens a server listens on loopback only: listen on 127.0.0.1, or remove LINESHAFT_AUTH."
        )
    if not await tokens.exist():
        raise SettingsError(
            f"Asked to listen on {host}, where other machines can call, but there is no token yet. Create "
            "one first: lineshaft token create --name NAME --scope SCOPE. Or listen on 127.0.0.1."
        )
