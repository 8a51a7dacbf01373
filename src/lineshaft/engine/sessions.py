"""Sessions of the dashboard: rows that all servers share. The secret is in a cookie and never stored."""

import hashlib
import secrets
from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from msgspec import Struct

from lineshaft.engine.caller import calling
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows
from lineshaft.errors import InvalidInputError
from lineshaft.model.storable import is_storable
from lineshaft.types import Scope, Token

#: A session ends when it was not used for so long ...
IDLE = timedelta(hours=12)
#: ... and after this time in any case.
LONGEST = timedelta(days=7)
#: Its use is recorded only so often: a page should not cost a write.
_RECORD_EVERY = timedelta(minutes=5)
_RANDOM_BYTES = 32
MAX_NAME = 200

_SQL = catalog.load(__name__)


class _SessionRow(NamedTuple):
    name: str
    token_id: str | None
    used_at: datetime
    scope: str | None
    agent_id: str | None
    budget_usd: Decimal | None
    account: int | None
    now: datetime


class Session(Struct, frozen=True):
    #: Who acts.
    name: str
    #: None: no token was needed when the session began.
    token_id: str | None
    #: What its token has.
    scope: Scope | None
    agent_id: str | None
    budget_usd: Decimal | None
    #: The user id on this machine that the session belongs to; None: any.
    account: int | None


class Sessions:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(
        self, *, token: Token | None = None, name: str | None = None, account: int | None = None
    ) -> str:
        """A new session of this token, or of a person where no token is needed; returns its secret."""
        name = token.name if token is not None else (name or "").strip()
        if not name or len(name) > MAX_NAME or not is_storable(name):
            raise InvalidInputError(errors=[("name", f"must be a text of 1 to {MAX_NAME} characters")])
        secret = secrets.token_urlsafe(_RANDOM_BYTES)
        token_id = None if token is None else token.id
        await self._write("insert_session", secret, token_id=token_id, name=name, account=account)
        return secret

    async def find(self, secret: str) -> Session | None:
        """None: unknown, ended, or its token was revoked."""
        limits = {"idle_sec": IDLE.total_seconds(), "longest_sec": LONGEST.total_seconds()}
        async with self._database.connection() as connection:
            parameters = {**self._database.now, **limits, "hash": _hash(secret)}
            found = await fetch_rows(connection, _SessionRow, _SQL["find_session"], parameters)
        if not found:
            return None
        row = found[0]
        if row.now - row.used_at > _RECORD_EVERY:
            await self._write("use_session", secret)
        scope = None if row.scope is None else Scope(row.scope)
        return Session(row.name, row.token_id, scope, row.agent_id, row.budget_usd, row.account)

    async def end(self, secret: str) -> None:
        await self._write("delete_session", secret)

    async def forget(self, limit: int) -> int:
        """Delete sessions that have ended; returns their number."""
        parameters = {**self._database.now, "idle_sec": IDLE.total_seconds(), "limit": limit}
        async with self._database.connection() as connection:
            return len(await fetch_column(connection, _SQL["delete_ended_sessions"], parameters))

    async def _write(self, statement: str, secret: str, **values: str | int | None) -> None:
        with calling(only_reads=False):
            async with self._database.connection() as connection:
                parameters = {**self._database.now, "hash": _hash(secret), **values}
                await connection.execute(_SQL[statement], parameters)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
