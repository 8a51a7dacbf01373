"""Circuit breakers: `model/breaker.py` decides, this module locks, writes and logs events.

A breaker is the last row that a transaction locks: a transaction that waits for one can't block its owner.

**Success is free as long as nothing fails.** `complete_tasks` returns for each task the breakers that have
failures to reset or that wait for it as their probe; usually there are none.

**One probe.** Only a claim starts a probe, in one transaction with the task: it tries an advisory lock,
claims the task, and then updates the breaker, whose row decides. A second claim is rolled back.

**No probe is lost.** Every end of a claim passes through here: success and failures that count decide, all
others free the probe (transition/effects.py).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lineshaft.engine.feed.actor import with_actor
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_rows, fetch_value
from lineshaft.errors import InvalidInputError
from lineshaft.model import breaker as model
from lineshaft.model.accounts import ACCOUNT
from lineshaft.model.breaker import (
    Breaker,
    BreakerChange,
    BreakerConfig,
    BreakerPolicy,
    BreakerState,
    policy_from_document,
)
from lineshaft.model.storable import is_storable

MODEL = "model:"
MAX_KEY = 500
DEFAULT_POLICY = BreakerPolicy()
_NO_ACT: Mapping[str, object] = MappingProxyType({})

_SQL = catalog.load(__name__)
_LOSSES = msgspec.json.Decoder(tuple[tuple[str, datetime], ...])


class CountedFailure(Struct, frozen=True):
    """A failed attempt that counts against its type, its model and its account."""

    task_id: str
    type: str
    model: str | None
    #: The process that was lost with it; None: it failed in another way.
    lost: str | None = None
    #: Counts against its type also where no breaker is configured for that.
    by_default: bool = True
    account: str | None = None

    def counts(self, key: str, breaker: Breaker, policy: BreakerPolicy) -> bool:
        """Whether this breaker counts it; the result of a probe always decides."""
        return self.by_default or key in policy.overrides or breaker.probe_task_id == self.task_id


class _BreakerRow(Struct, frozen=True):
    now: datetime
    key: str
    state: str
    failures: int
    last_failure: datetime | None
    opened_at: datetime | None
    half_open_at: datetime | None
    probe_at: datetime | None
    probe_task_id: str | None
    forced: bool
    #: [[process, time]], as JSON.
    losses: str

    @property
    def breaker(self) -> Breaker:
        return Breaker(
            state=BreakerState(self.state),
            failures=self.failures,
            last_failure=self.last_failure,
            opened_at=self.opened_at,
            half_open_at=self.half_open_at,
            probe_task_id=self.probe_task_id,
            forced=self.forced,
            losses=_LOSSES.decode(self.losses),
        )

    def config(self, policy: BreakerPolicy) -> BreakerConfig:
        """As configured, but with the pause of the node that opened it: its configuration may differ."""
        config = policy.config_for(self.key)
        if self.probe_at is None or self.opened_at is None:
            return config
        return replace(config, half_open_after_sec=(self.probe_at - self.opened_at).total_seconds())


Decide = Callable[[_BreakerRow], list[BreakerChange]]


class Breakers:
    """Thresholds are a row of the database (guards/limits.py), so that every process uses the same."""

    def __init__(self, database: Database) -> None:
        self._database = database
        #: The row that was read last, and what it says.
        self._known: tuple[bytes | None, BreakerPolicy] = (None, DEFAULT_POLICY)

    async def _policy(self, connection: Connection) -> BreakerPolicy:
        document: bytes | None = await fetch_value(connection, _SQL["read_policy"], {})
        if document != self._known[0]:
            policy, _ = policy_from_document(None if document is None else msgspec.json.decode(document))
            self._known = (document, DEFAULT_POLICY if document is None else policy)
        return self._known[1]

    # In the transaction that ends a claim, after everything else.

    async def failed(self, connection: Connection, attempts: Sequence[CountedFailure]) -> None:
        """Count failed attempts of the categories that count."""
        if not attempts:
            return
        policy = await self._policy(connection)
        by_key: dict[str, list[CountedFailure]] = {}
        for attempt in attempts:
            for key in _keys(attempt, policy):
                by_key.setdefault(key, []).append(attempt)
        counted = [
            key for key, of in by_key.items() if key in policy.overrides or any(one.by_default for one in of)
        ]
        if counted:
            await connection.execute(_SQL["make_breakers"], {"keys": counted})

        def decide(row: _BreakerRow) -> list[BreakerChange]:
            changes = []
            breaker = row.breaker
            for attempt in by_key[row.key]:
                if not attempt.counts(row.key, breaker, policy):
                    continue
                change = model.on_failure(
                    breaker,
                    policy.config_for(row.key),
                    key=row.key,
                    task_id=attempt.task_id,
                    now=row.now,
                    counts=True,
                    lost=attempt.lost,
                )
                changes.append(change)
                breaker = change.breaker
            return changes

        await self._move(connection, by_key, decide, policy)

    async def succeeded(self, connection: Connection, tasks: Iterable[tuple[str, Collection[str]]]) -> None:
        """`tasks` are ids, each with the breakers that its success concerns."""
        ids_by_key: dict[str, list[str]] = {}
        for task_id, keys in tasks:
            for key in keys:
                ids_by_key.setdefault(key, []).append(task_id)
        if not ids_by_key:
            return

        def decide(row: _BreakerRow) -> list[BreakerChange]:
            changes = []
            breaker = row.breaker
            for task_id in ids_by_key[row.key]:
                changes.append(model.on_success(breaker, task_id=task_id))
                breaker = changes[-1].breaker
            return changes

        await self._move(connection, ids_by_key, decide)

    async def start_probe(self, connection: Connection, task_id: str, keys: Collection[str]) -> bool:
        """Make a task that was just claimed the probe of these breakers; False: one of them has another."""
        denied = []
        policy = await self._policy(connection)

        def decide(row: _BreakerRow) -> list[BreakerChange]:
            config = row.config(policy)
            if model.admission(row.breaker, config, row.now) is not model.Admission.PROBE:
                denied.append(row.key)
                return []
            return [model.hand_out_probe(row.breaker, config, task_id=task_id, now=row.now)]

        await self._move(connection, keys, decide)
        return not denied

    # Manual changes.

    async def open(self, key: str, *, reason: str | None = None) -> None:
        """Stop claims of this type, model:NAME or account:NAME until it is reset."""
        _check_key(key)
        act = with_actor(reason=reason)

        async def work(connection: Connection) -> None:
            await connection.execute(_SQL["make_breakers"], {"keys": [key]})
            await self._move(
                connection, [key], lambda row: [model.force_open(row.breaker, key=key, now=row.now)], act=act
            )

        await self._database.run(work)

    async def reset(self, key: str, *, reason: str | None = None) -> None:
        """Close it and clear its failures."""
        _check_key(key)
        act = with_actor(reason=reason)

        async def work(connection: Connection) -> None:
            await self._move(connection, [key], lambda row: [model.reset(row.breaker)], act=act)

        await self._database.run(work)

    async def free_lost_probes(self) -> int:
        async with self._database.connection() as connection:
            return len(await fetch_column(connection, _SQL["free_lost_probes"], {}))

    async def _move(
        self,
        connection: Connection,
        keys: Collection[str],
        decide: Decide,
        policy: BreakerPolicy = DEFAULT_POLICY,
        act: Mapping[str, object] = _NO_ACT,
    ) -> None:
        """Lock breakers, decide about each, write the changed ones and log events.

        `policy`: needed where `decide` may open a breaker. `act`: who changes it by hand, and why.
        """
        parameters = {**self._database.now, "keys": sorted(keys)}
        rows = await fetch_rows(connection, _BreakerRow, _SQL["lock_breakers"], parameters)
        written = []
        for row in rows:
            changes = decide(row)
            if changes and changes[-1].breaker != row.breaker:
                written.append(_columns(row, changes, policy, act))
        if not written:
            return
        arrays = dict(zip(_COLUMNS, map(list, zip(*written, strict=True)), strict=True))
        await connection.execute(_SQL["write_breakers"], {**self._database.now, **arrays})


def _keys(attempt: CountedFailure, policy: BreakerPolicy) -> list[str]:
    """Its type; also its model and its account, if they have a breaker in the configuration."""
    named = ((MODEL, attempt.model), (ACCOUNT, attempt.account))
    keys = (prefix + name for prefix, name in named if name is not None)
    return [attempt.type, *(key for key in keys if key in policy.overrides)]


def _columns(
    row: _BreakerRow, changes: Sequence[BreakerChange], policy: BreakerPolicy, act: Mapping[str, object]
) -> tuple[object, ...]:
    breaker = changes[-1].breaker
    kinds = [str(change.event) for change in changes if change.event is not None]
    data: dict[str, object] = {"key": row.key, "failures": breaker.failures, **act}
    if breaker.probe_task_id is not None:
        data["probe_task_id"] = breaker.probe_task_id
    if alerts := [change.alert for change in changes if change.alert is not None]:
        kinds.append("alert")
        data["message"] = alerts[-1]
    return (
        row.key,
        breaker.state,
        breaker.failures,
        breaker.last_failure,
        breaker.opened_at,
        breaker.half_open_at,
        _probe_at(row, breaker, policy),
        breaker.probe_task_id,
        breaker.forced,
        msgspec.json.encode(breaker.losses).decode(),
        "{" + ",".join(kinds) + "}" if kinds else None,
        msgspec.json.encode(data).decode() if kinds else None,
    )


def _probe_at(row: _BreakerRow, breaker: Breaker, policy: BreakerPolicy) -> datetime | None:
    if breaker.opened_at is None or breaker.forced:
        return None
    if breaker.opened_at == row.opened_at and row.probe_at is not None:
        return row.probe_at
    return breaker.opened_at + timedelta(seconds=policy.config_for(row.key).half_open_after_sec)


_COLUMNS = (
    "keys",
    "states",
    "failures",
    "last_failures",
    "opened_at",
    "half_open_at",
    "probe_at",
    "probes",
    "forced",
    "losses",
    "kinds",
    "data",
)


def _check_key(key: str) -> None:
    if not key or len(key) > MAX_KEY or not is_storable(key):
        rule = f"must be a task type, model:NAME or account:NAME of up to {MAX_KEY} characters"
        raise InvalidInputError(errors=[("key", f"{rule}, got {key[:50]!r}")])
