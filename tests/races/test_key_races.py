"""An idempotency key whose window is over, and two who want it."""

import psycopg

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import Completion
from tests.races.helpers import DONE, held, race, running
from tests.world import ref

KEY_ROW = "SELECT FROM lineshaft.task_key WHERE key = %s FOR UPDATE"


async def test_two_submissions_meet_at_a_key_whose_window_is_over(
    engines: tuple[Engine, Engine], dsn: str, clock: MovableClock
) -> None:
    """U8: one of them takes it over, and the other gets its task."""
    one, two = engines
    task = NewTask("x", idempotency_key="k", idempotency_ttl_sec=60)
    (old,) = await one.submission.submit([task])
    (claimed,) = await running(one)
    await one.work.complete([Completion(ref(claimed), DONE)])
    clock.advance(61)

    with held(dsn, KEY_ROW, "k") as holder, psycopg.connect(dsn, autocommit=True) as look:
        found = await race(look, holder, one.submission.submit([task]), two.submission.submit([task]))

    (first,), (second,) = found
    assert first.id == second.id != old.id
    assert sorted([first.duplicate, second.duplicate]) == [False, True]
