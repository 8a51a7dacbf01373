"""Limits of types on existing tasks: on waiting ones when the limits change, on others when they are claimed.

A task records which limits its caller left open, and the revision of its type that they have. A claim returns
whether that is still the present one. So a task can't slip through: one that was being submitted or claimed
while the limits changed, or comes out of a transaction that was open for hours, is corrected before an agent
gets it.
"""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows
from lineshaft.engine.submit.lanes import Lanes, wake_lanes
from lineshaft.model.budget import attempt_limit, money
from lineshaft.model.presets import preset_named
from lineshaft.model.priority import Lane
from lineshaft.model.tasks import OPEN_COST, TaskRules, TypeLimits
from lineshaft.types.work import ClaimedTask

_SQL = catalog.load(__name__)
#: Tasks of one transaction.
_BATCH = 500
#: Batches that a change of limits waits for. Claims correct the rest, each a batch.
_BATCHES = 40

_decode = msgspec.json.Decoder(TypeLimits).decode


class _Type(NamedTuple):
    revision: int
    #: JSON.
    limits: bytes


class _LimitedTask(Struct, frozen=True):
    id: str
    is_ready: bool
    required_capabilities: list[str]
    models: list[str]
    boost_per_minute: float
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    #: What earlier attempts have cost.
    cost_usd: Decimal
    preset: str
    open_limits: int


class _Progress(NamedTuple):
    revision: int
    #: All tasks up to this one are done.
    task_id: str


class LimitsOfTypes:
    def __init__(self, database: Database, lanes: Lanes, rules: TaskRules) -> None:
        self._database = database
        self._lanes = lanes
        self._rules = rules
        #: By type: where the next batch begins.
        self._progress: dict[str, _Progress] = {}

    async def apply(self, types: Iterable[str], *, batches: int = _BATCHES) -> None:
        """Give waiting tasks of these types the present limits, in batches."""
        for type_ in types:
            for _ in range(batches):
                reached = await self._database.run(partial(self._apply_batch, type_))
                if reached is None:
                    # From the beginning next time: some may have been locked.
                    self._progress.pop(type_, None)
                    break
                self._progress[type_] = reached

    async def correct(self, tasks: Sequence[ClaimedTask]) -> None:
        """Give tasks that were just claimed the present limits, and the next waiting ones of their types."""
        by_type: dict[str, list[ClaimedTask]] = {}
        for task in tasks:
            by_type.setdefault(task.type, []).append(task)
        for type_, claimed in by_type.items():
            await self._database.run(partial(self._correct, type_, claimed))
        await self.apply(by_type, batches=1)

    async def _correct(self, type_: str, claimed: Sequence[ClaimedTask], connection: Connection) -> None:
        claims = {"ids": [task.id for task in claimed], "epochs": [task.epoch for task in claimed]}
        rows = await fetch_rows(connection, _LimitedTask, _SQL["lock_claimed"], claims)
        known = await fetch_row(connection, _Type, _SQL["read_type"], {"type": type_})
        if known is not None:
            await self._write(connection, type_, known, rows)

    async def _apply_batch(self, type_: str, connection: Connection) -> _Progress | None:
        """None: there are no more."""
        known = await fetch_row(connection, _Type, _SQL["hold_type"], {"type": type_})
        if known is None:
            return None
        before = self._progress.get(type_)
        after = before.task_id if before is not None and before.revision == known.revision else ""
        asked = {"type": type_, "after": after, "revision": known.revision, "limit": _BATCH}
        rows = await fetch_rows(connection, _LimitedTask, _SQL["lock_waiting"], asked)
        await self._write(connection, type_, known, rows)
        return _Progress(known.revision, rows[-1].id) if len(rows) == _BATCH else None

    async def _write(
        self, connection: Connection, type_: str, known: _Type, rows: Sequence[_LimitedTask]
    ) -> None:
        if not rows:
            return
        limits = _decode(known.limits)
        cost = None if limits.max_cost_usd is None else money(limits.max_cost_usd)
        lanes = [
            Lane.of(
                type_,
                row.required_capabilities,
                row.models,
                row.boost_per_minute,
                attempt_limit(
                    cost if row.open_limits & OPEN_COST else row.max_cost_usd,
                    row.max_total_cost_usd,
                    row.cost_usd,
                ),
            )
            for row in rows
        ]
        lane_ids = {lane: found.id for lane, found in (await self._lanes.find(connection, lanes)).items()}
        presets = [preset_named(row.preset) for row in rows]
        await connection.execute(
            _SQL["apply_limits"],
            {
                **self._database.now,
                "revision": known.revision,
                "max_cost_usd": cost,
                "max_attempts": limits.max_attempts,
                "max_duration_sec": limits.max_duration_sec,
                "retry": None if limits.retry is None else msgspec.json.encode(limits.retry).decode(),
                "ids": [row.id for row in rows],
                "open_limits": [row.open_limits for row in rows],
                "lane_ids": [lane_ids[lane] for lane in lanes],
                "attempts": [preset.max_attempts for preset in presets],
                "durations": [preset.max_duration_sec or self._rules.max_duration_sec for preset in presets],
            },
        )
        ready = [lane_ids[lane] for lane, row in zip(lanes, rows, strict=True) if row.is_ready]
        await wake_lanes(connection, ready)
