"""Makes READY what has waited long enough, moves tasks up as deadlines near, and mends what slipped through.

It also watches the money: tasks that nobody can afford are told once, spending that goes too fast is stopped.

Due are back-offs, rate-limit waits, snoozes and `run_at`. Tasks parked for a lock that is free, or in a
generation that is closed, should not exist; they are looked for all the same, because nobody else would ever
find them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lineshaft.duties.batches import take_all
from lineshaft.duties.loop import Counts
from lineshaft.engine.maintenance import Upkeep
from lineshaft.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Promoter:
    upkeep: Upkeep
    interval_sec: float = 5.0
    batch: int = 1_000
    name: str = "promoter"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        failed: Exception | None = None
        for step in (self._promote, self._rekey, self._mend):
            try:
                await step(counts)
            except UnavailableError:
                raise
            except Exception as error:  # noqa: BLE001 - told when the others are done, which it must not keep waiting
                failed = failed or error
        if failed is not None:
            raise failed
        return counts

    async def _promote(self, counts: Counter[str]) -> None:
        async def take(limit: int, without: Sequence[str]) -> int:
            due = await self.upkeep.promote_due(limit, without)
            counts["promoted"] += due
            return due

        if stuck := await take_all(take, self.batch):
            counts["stuck"] = stuck

    async def _rekey(self, counts: Counter[str]) -> None:
        while True:
            rekeyed, missed = await self.upkeep.rekey_deadlines(self.batch)
            counts["rekeyed"] += rekeyed
            counts["deadlines missed"] += missed
            if rekeyed < self.batch:
                return

    async def _mend(self, counts: Counter[str]) -> None:
        counts["locks expired"] += await self.upkeep.expire_locks()
        await self.upkeep.recheck_parked(self.batch)
        counts.update(await self.upkeep.watch_guards(self.batch))
        await self.upkeep.close_generations(self.batch)
