"""Authentication of callers, and their scopes."""

import hashlib
import hmac
import ipaddress
import math
import os
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from lineshaft.engine.caller import LOCAL_CALLER, Caller
from lineshaft.engine.tokens import Tokens
from lineshaft.errors import SettingsError, UnauthorizedError
from lineshaft.server.framework.peers import Accounts, peer_of
from lineshaft.types import Scope

#: Trusted on loopback until the first token is created: it has the server's account.
_TRUSTED = Caller(actor=LOCAL_CALLER.name)
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
_CODE_PREFIX = "once_"
_CODE_SEC = 3_600.0


class FirstTokenCode:
    """Makes the first token where the account that calls can't be looked up. Only its hash is kept."""

    def __init__(self, code: str) -> None:
        self._hash = _hash(code)
        self._ends_at = time.monotonic() + _CODE_SEC

    def allows(self, secret: str) -> bool:
        return time.monotonic() < self._ends_at and hmac.compare_digest(self._hash, _hash(secret))


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


class Authenticator:
    """Finds the caller of a request.

    `auth` is the setting: with `auto`, the server's own account is trusted without a token until the first
    token is created; with `off`, every account of this machine, and after that too.
    """

    def __init__(self, tokens: Tokens, *, auth: str, host: str) -> None:
        self._tokens = tokens
        self._off = auth == "off"
        #: Once True, it stays so: revoking the last token opens nothing.
        self.required = auth == "required" or not is_loopback(host)
        self._asked_at = -math.inf
        self._accounts = Accounts()
        self._code: FirstTokenCode | None = None

    async def start(self) -> str | None:
        """When the server starts; returns the code for the first token, if one is needed."""
        await self.refresh()
        if self.required or self._off or await self._accounts.work():
            return None
        self.required = True
        code = _CODE_PREFIX + secrets.token_urlsafe(24)
        self._code = FirstTokenCode(code)
        return code

    async def account(self, request: AsgiScope) -> int | None:
        """The user id that calls; None: it isn't of this machine, or isn't known."""
        return await peer_of(request).account(self._accounts)

    async def refresh(self) -> None:
        """Find out whether a token has been created; at the start, and as callers come."""
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

    async def caller(self, request: AsgiScope, scope: Scope) -> Caller:
        """The caller, who asks for this scope. A token is checked even where none is needed."""
        headers = Headers(scope=request)
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
            if not self._off and await self.account(request) != os.geteuid():
                raise UnauthorizedError(
                    "The call comes from another account of this machine, such as a proxy's. Until there is "
                    "a token, only the server's own account may call without one: send the header "
                    f"'Authorization: Bearer TOKEN'. {_CREATE_ONE}"
                )
            return _TRUSTED
        scheme, _, secret = authorization.partition(" ")
        if scope is Scope.ADMIN and await self._is_first(secret.strip()):
            return Caller(actor=LOCAL_CALLER.name, needs_token=True)
        token = await self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise UnauthorizedError(
                "The Authorization header has no valid token: it must be 'Bearer TOKEN' with a token that "
                "was not revoked. See 'lineshaft token list'."
            )
        self.notice_token()
        return Caller(
            token.id, token.name, token.scope, token.agent_id, token.budget_usd, token.name, self.required
        )

    async def _is_first(self, secret: str) -> bool:
        """Whether this is the code for the first token, and there was none yet."""
        if self._code is None or not self._code.allows(secret):
            return False
        return not await self._tokens.ever_existed()


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
