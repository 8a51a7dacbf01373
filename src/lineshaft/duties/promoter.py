"""Promotes due tasks to READY, re-keys tasks as their deadlines approach, and repairs inconsistencies.

It also watches spending: tasks that no agent can afford are reported once, and spending that is too fast is
stopped.

Tasks become due after back-offs, rate-limit waits, snoozes and at `run_at`. Tasks parked for a free lock, or
in a closed generation, should not exist; the promoter looks for them because nothing else would find them.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from lineshaft.duties.batches import take_all
from lineshaft.duties.loop import Counts
from lineshaft.engine.maintenance import Maintenance
from lineshaft.errors import UnavailableError

_EXPIRED_AT_ONCE = 100


class Promoter(Struct, frozen=True):
    maintenance: Maintenance
    interval_sec: float = 5.0
    batch: int = 1_000
    name: str = "promoter"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        failed: Exception | None = None
        for step in (self._promote, self._rekey, self._repair):
            try:
                await step(counts)
            except UnavailableError:
                raise
            except Exception as error:  # noqa: BLE001 - raised after the other steps, which it must not stop
                failed = failed or error
        if failed is not None:
            raise failed
        return counts

    async def _promote(self, counts: Counter[str]) -> None:
        async def take(limit: int, without: Sequence[str]) -> int:
            due = await self.maintenance.promote_due(limit, without)
            counts["promoted"] += due
            return due

        if stuck := await take_all(take, self.batch):
            counts["stuck"] = stuck

    async def _rekey(self, counts: Counter[str]) -> None:
        # In small batches: each is a transaction that also cancels everything that depends on the tasks.
        while expired := await self.maintenance.expire_tasks(_EXPIRED_AT_ONCE):
            counts["deadlines missed"] += expired
            if expired < _EXPIRED_AT_ONCE:
                break
        while True:
            rekeyed, missed = await self.maintenance.rekey_deadlines(self.batch)
            counts["rekeyed"] += rekeyed
            counts["deadlines missed"] += missed
            if rekeyed < self.batch:
                return

    async def _repair(self, counts: Counter[str]) -> None:
        counts["locks expired"] += await self.maintenance.expire_locks()
        await self.maintenance.recheck_parked(self.batch)
        counts.update(await self.maintenance.watch_guards(self.batch))
        await self.maintenance.report_outages()
        await self.maintenance.close_generations(self.batch)
