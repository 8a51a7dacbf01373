"""Reservations: a handler acquires what it may use of the rates of a key, uses it, and settles.

A reservation is booked in the part of the window in which it was acquired, in all quotas of its key or in
none. Nothing has to be given back: what a lost claim has booked counts in full until it drops out of the
window. A call that waits holds neither a connection nor a transaction. Within a process those who wait for a
key take turns: only the first looks, so that small reservations don't pass a large one again and again.
"""

import asyncio
from decimal import Decimal
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

from lineshaft.engine.live.task_locks import TaskLocks
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_column, fetch_row, fetch_value
from lineshaft.errors import InvalidInputError, NotFoundError, RateLimitedError
from lineshaft.ids import new_id
from lineshaft.types.reservations import NewReservation, Settlement, Units
from lineshaft.types.work import ClaimRef

_SQL = catalog.load(__name__)
#: Others may have used less than they reserved, or the quota was changed.
_LOOK_AGAIN_SEC = 1.0


class _Acquired(Struct, frozen=True):
    verdict: str
    reservation: str | None
    #: The quota that decided, and what of it.
    quota: str | None
    unit: str | None
    asked: Decimal | None
    amount: Decimal | None
    per_sec: float | None
    wait_sec: float | None


class Reservations:
    def __init__(self, database: Database, locks: TaskLocks) -> None:
        self._database = database
        self._locks = locks
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def acquire(self, new: NewReservation, *, wait_sec: float = 0.0) -> str | None:
        """The id of the reservation; None: no quota of the key counts any of its units.

        Raises RateLimitedError if there is no room within `wait_sec`.
        """
        if wait_sec <= 0:
            return await self._acquire(new)
        clock = asyncio.get_running_loop().time
        turn, until = self._turns.setdefault(new.key, asyncio.Lock()), clock() + wait_sec
        try:
            async with asyncio.timeout_at(until):
                await turn.acquire()
        except TimeoutError:
            return await self._acquire(new)
        try:
            while True:
                try:
                    return await self._acquire(new)
                except RateLimitedError as error:
                    if (left := until - clock()) <= 0:
                        raise
                    await asyncio.sleep(min(error.retry_after_sec or left, left, _LOOK_AGAIN_SEC))
        finally:
            turn.release()

    async def _acquire(self, new: NewReservation) -> str | None:
        # An acquired reservation is one request, unless its caller says otherwise.
        units = {"requests": "1", **new.units.stated}
        parameters = {
            **self._database.now,
            "task_id": new.claim.id,
            "epoch": new.claim.epoch,
            "id": new_id("reservation"),
            "key": new.key,
            "idempotency_key": new.idempotency_key,
            "units": msgspec.json.encode(units).decode(),
        }

        async def work(connection: Connection) -> _Acquired:
            acquired = await fetch_row(connection, _Acquired, _SQL["acquire"], parameters)
            assert acquired is not None  # noqa: S101 - a function returns one row
            if acquired.verdict == "stale":
                await self._refuse(connection, new.claim, "acquire a quota for")
            return acquired

        acquired = await self._database.run_alone(work)
        if acquired.verdict == "never":
            fault = f"can never be acquired: {_asked(acquired)}; acquire less at once, or raise the quota"
            raise InvalidInputError(errors=[(f"units.{acquired.unit}", fault)])
        if acquired.verdict == "full":
            raise RateLimitedError(
                f"There is no room for {new.key!r}: {_asked(acquired)}, and too much of it is used. There is "
                f"room in {acquired.wait_sec:.3f} s, or earlier if others use less than they have reserved.",
                retry_after_sec=acquired.wait_sec,
            )
        return acquired.reservation

    async def settle(self, settlement: Settlement) -> None:
        """Book what was used in place of what was reserved; the last settlement of a reservation counts."""
        if settlement.reservation is None:
            return
        claim = settlement.claim
        parameters = {
            **self._database.now,
            "task_id": claim.id,
            "epoch": claim.epoch,
            "id": settlement.reservation,
            "units": _json(settlement.units),
            "remaining": _json(settlement.remaining),
        }

        async def work(connection: Connection) -> None:
            verdict = await fetch_value(connection, _SQL["settle"], parameters)
            if verdict == "stale":
                await self._refuse(connection, claim, "settle a reservation of")
            if verdict == "unknown":
                raise NotFoundError(
                    f"Task {claim.id} has no reservation {settlement.reservation!r} in this claim. Send "
                    "the one that acquire returned."
                )

        await self._database.run_alone(work)

    async def _refuse(self, connection: Connection, claim: ClaimRef, verb: str) -> None:
        (refused,) = await self._locks.refuse(connection, [claim], verb)
        refused.unwrap()
        raise AssertionError("a claim that isn't held is refused")

    async def forget(self, batch: int) -> int:
        """Delete reservations of ended claims, so many in a transaction; returns how many in all."""
        total = 0
        while True:
            async with self._database.connection() as connection:
                deleted = await fetch_column(connection, _SQL["delete_ended_reservations"], {"limit": batch})
            total += len(deleted)
            if len(deleted) < batch:
                return total


def _json(units: Units) -> str:
    return msgspec.json.encode(units.stated).decode()


def _asked(acquired: _Acquired) -> str:
    asked, amount = acquired.asked or Decimal(0), acquired.amount or Decimal(0)
    return (
        f"{asked.normalize():f} {acquired.unit} were asked for, and the quota {acquired.quota!r} allows "
        f"{amount.normalize():f} in {acquired.per_sec:g} s"
    )
