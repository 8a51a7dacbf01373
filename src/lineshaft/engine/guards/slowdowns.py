"""Slowdowns after a rate limit: claims avoid an account, a model, a provider, an agent or everything.

The latest signal decides, even if it is the shorter one; but the window of an account isn't shortened by a
rate limit of seconds. Agents get it with claims and heartbeats.

Agents without an open account are reported once, and once when an account opens (`account_outage`). Of two
transactions that close the last two accounts of an agent neither sees the other: each looks after its commit,
and the promoter looks, too.
"""

import contextlib
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from lineshaft.engine.feed.actor import act_json
from lineshaft.engine.live.waking import wake_all
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_value
from lineshaft.errors import NotFoundError, UnavailableError
from lineshaft.model.accounts import ACCOUNT, AGENT
from lineshaft.model.retry import LONGEST_DELAY_SEC, fault_in, number_fault, raise_faults
from lineshaft.model.storable import is_storable, replace_unstorable
from lineshaft.types.work import Failure

MAX_REASON = 500
MAX_KEY = 500
EVERYONE = "*"
_PREFIXES = (ACCOUNT, "model:", "provider:", AGENT)

_SQL = catalog.load(__name__)


class RateLimited(Struct, frozen=True):
    """A task met a rate limit: claims avoid its account, or its model."""

    agent_id: str | None
    incarnation: int | None
    model: str | None
    slowdown_sec: float
    reason: str
    account: str | None = None
    #: It is too long for everyone to wait: where neither account nor model is known, only the agent does.
    is_window: bool = False


class Slowdowns:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def signal_slowdowns(self, connection: Connection, limits: Sequence[RateLimited]) -> None:
        """In the transaction that records the rate limits."""
        signals = [limit for limit in limits if limit.slowdown_sec > 0]
        if not signals:
            return
        await connection.execute(
            _SQL["signal_slowdowns"],
            {
                **self._database.now,
                "agent_ids": [limit.agent_id for limit in signals],
                "incarnations": [limit.incarnation for limit in signals],
                "models": [limit.model for limit in signals],
                "accounts": [limit.account for limit in signals],
                "windows": [limit.is_window for limit in signals],
                "waits": [limit.slowdown_sec for limit in signals],
                "reasons": [limit.reason[:MAX_REASON] for limit in signals],
            },
        )

    async def report_outages(self) -> None:
        """Log an alert for each agent whose accounts have all been closed since, or that has an open one."""
        async with self._database.connection() as connection:
            await connection.execute(_SQL["report_outages"], self._database.now)

    async def report_outages_of(self, failures: Sequence[Failure]) -> None:
        """After the commit of these failures, some of which may have closed an account."""
        if any(failure.is_rate_limit for failure in failures):
            # They are recorded, whether this works or not.
            with contextlib.suppress(UnavailableError):
                await self.report_outages()

    async def slow_down(self, key: str, wait_sec: float, reason: str | None = None) -> datetime | None:
        """Slow down a key; `provider:NAME` is all models `NAME/…`, and `*` is everything.

        Returns the end of the slowdown; None: a newer signal is in force.
        """
        faults = {"key": _key_fault(key), "wait_sec": number_fault(wait_sec, 0, LONGEST_DELAY_SEC)}
        raise_faults(faults)
        stored = None if reason is None else replace_unstorable(reason[:MAX_REASON])
        parameters = {**self._database.now, "key": key, "wait": wait_sec, "reason": stored}
        async with self._database.connection() as connection:
            until: datetime | None = await fetch_value(connection, _SQL["broadcast_slowdown"], parameters)
        return until

    async def end(self, key: str, *, reason: str | None = None) -> None:
        """End a slowdown that is in force; agents look for work again at once."""
        unknown = NotFoundError(f"There is no slowdown {key!r} in force.")
        if not is_storable(key):
            raise unknown
        act = act_json(reason=reason)

        async def work(connection: Connection) -> None:
            parameters = {**self._database.now, "key": key, "act": act}
            if not await fetch_column(connection, _SQL["end_slowdown"], parameters):
                raise unknown
            await wake_all(connection)

        await self._database.run(work)


def _key_fault(key: str) -> str | None:
    named = key.startswith(_PREFIXES) and not key.endswith(":")
    ok = (key == EVERYONE or named) and len(key) <= MAX_KEY and is_storable(key)
    return fault_in(key, "must be account:NAME, model:NAME, provider:NAME, agent:ID or *", ok=ok)
