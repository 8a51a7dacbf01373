"""Makes READY what has waited long enough, moves tasks up as deadlines near, and mends what slipped through.

It also watches the money: tasks that nobody can afford are told once, spending that goes too fast is stopped.

Due are back-offs, rate-limit waits, snoozes and `run_at`. Tasks parked for a lock that is free, or in a
generation that is closed, should not exist; they are looked for all the same, because nobody else would ever
find them.
"""

from collections import Counter
from dataclasses import dataclass

from lineshaft.duties.loop import Counts
from lineshaft.store.upkeep import Upkeep


@dataclass(frozen=True, slots=True)
class Promoter:
    upkeep: Upkeep
    interval_sec: float = 5.0
    batch: int = 1_000
    name: str = "promoter"

    async def run_once(self) -> Counts:
        counts: Counter[str] = Counter()
        while (due := await self.upkeep.promote_due(self.batch)) > 0:
            counts["promoted"] += due
            if due < self.batch:
                break
        while True:
            rekeyed, missed = await self.upkeep.rekey_deadlines(self.batch)
            counts["rekeyed"] += rekeyed
            counts["deadlines missed"] += missed
            if rekeyed < self.batch:
                break
        counts["locks expired"] += await self.upkeep.expire_locks()
        await self.upkeep.recheck_parked(self.batch)
        counts.update(await self.upkeep.watch_guards(self.batch))
        await self.upkeep.close_generations(self.batch)
        return counts
