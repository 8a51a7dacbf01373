"""Bearer tokens. The secret is returned once and never stored."""

import hashlib
import secrets
from decimal import Decimal
from typing import Any

from psycopg.rows import dict_row

from lineshaft.engine.feed.actor import act_json, actor_name
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_value
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.ids import new_id
from lineshaft.model.budget import money
from lineshaft.model.storable import is_storable
from lineshaft.types import NewToken, Scope, Token

#: Identifies a token to people and to scanners for leaked secrets.
PREFIX = "lsh_"
_RANDOM_BYTES = 32
MAX_NAME = 200
MAX_AGENT_ID = 200

_SQL = catalog.load(__name__)


class Tokens:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        name: str,
        scope: str,
        *,
        agent_id: str | None = None,
        budget_usd: Decimal | float | None = None,
    ) -> NewToken:
        """A new token with its secret, which can't be read again.

        With `agent_id` it may act only as that agent, whose budget is `budget_usd`, if that is given.
        """
        faults = []
        if not name.strip() or len(name) > MAX_NAME or not is_storable(name):
            faults.append(("name", f"must be a text of 1 to {MAX_NAME} characters, got {name!r}"))
        if scope not in tuple(Scope):
            faults.append(("scope", f"must be one of {', '.join(Scope)}, got {scope!r}"))
        if agent_id is not None:
            if not 0 < len(agent_id) <= MAX_AGENT_ID or not is_storable(agent_id):
                faults.append(
                    ("agent_id", f"must be a text of 1 to {MAX_AGENT_ID} characters, got {agent_id!r}")
                )
            if scope != Scope.AGENT:
                faults.append(("agent_id", f"is only for the scope agent, got the scope {scope!r}"))
        elif budget_usd is not None:
            faults.append(("budget_usd", "is the budget of one agent: give agent_id too"))
        if faults:
            raise InvalidInputError(errors=faults)
        secret = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        values = {
            "id": new_id("token"),
            "name": name,
            "scope": scope,
            "hash": _hash(secret),
            "agent_id": agent_id,
            "budget_usd": None if budget_usd is None else money(budget_usd, "budget_usd"),
            "act": act_json(),
        }
        (record,) = await self._rows("insert_token", **self._database.now, **values)
        return NewToken(record.id, record.name, record.scope, secret, record.agent_id, record.budget_usd)

    async def all(self) -> list[Token]:
        """All tokens, including revoked ones, oldest first."""
        return await self._rows("list_tokens")

    async def revoke(self, which: str, *, pause_sources: bool = False) -> list[Token]:
        """By id, or all valid ones with that name; takes effect with the next request.

        Sources of a token that is bound to an agent pause: it has lost what it creates work for. Those of
        other tokens pause with `pause_sources`.
        """

        async def work(connection: Connection) -> list[Token]:
            revoked = await _fetch(
                connection, "revoke_token", **self._database.now, which=which, act=act_json()
            )
            owners = [token.id for token in revoked if pause_sources or token.agent_id is not None]
            if owners:
                about = {"actor": actor_name(), "act": act_json(reason="its token was revoked")}
                parameters = {**self._database.now, **about, "token_ids": owners}
                await connection.execute(_SQL["pause_sources"], parameters)
            return revoked

        revoked = await self._database.run(work, pipeline=False)
        if not revoked:
            raise NotFoundError(
                f"There is no token with the id or name {which!r}. See 'lineshaft token list'."
            )
        return revoked

    async def find(self, secret: str) -> Token | None:
        """The token with this secret; None: unknown or revoked."""
        found = await self._rows("find_token", hash=_hash(secret))
        return found[0] if found else None

    async def exist(self) -> bool:
        """Whether there is any valid token."""
        async with self._database.connection() as connection:
            return bool(await fetch_value(connection, _SQL["any_token"], {}))

    async def ever_existed(self) -> bool:
        """Whether a token has ever been created. Revoked ones are kept."""
        async with self._database.connection() as connection:
            return bool(await fetch_value(connection, _SQL["any_token_ever"], {}))

    async def _rows(self, statement: str, **parameters: Any) -> list[Token]:
        async with self._database.connection() as connection:
            return await _fetch(connection, statement, **parameters)


async def _fetch(connection: Connection, statement: str, **parameters: Any) -> list[Token]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(_SQL[statement], parameters)
        return [Token(**{**row, "scope": Scope(row["scope"])}) for row in await cursor.fetchall()]


def _hash(secret: str) -> bytes:
    # The secret has 256 random bits: a slow hash would only slow down every request.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
