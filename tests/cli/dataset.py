"""One of everything that lists show, with fixed ids and times that are read as `2h ago`."""

from datetime import UTC, datetime, timedelta

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.model.tasks import NewTask, RetrySpec
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types import Scope
from lineshaft.types.reservations import NewReservation, Units
from lineshaft.types.work import ClaimRef, Failure
from tests.world import Actions, cost, record_step

#: Seconds from the time of the data set to after the test.
SLOW = 20_400
#: All made in the same millisecond, as ids of one call are.
TASK = "task_01M7NE37SB1NE956YSAMN"
DONE, RUNNING, DEAD, CANCELLED, SCHEDULED, PERSON, RETRYING = (
    f"{TASK}{end}" for end in ("MT8AV", "NK2P1", "PV03C", "QX9DE", "RA7FG", "SB6H2", "TC5J3")
)
COLLECT, CHECK, WRITE = (f"{TASK}{end}" for end in ("VD4K4", "WE3M5", "XF2N6"))
TRACEBACK = 'Traceback (most recent call last):\n  File "coder.py", line 7, in implement\nValueError: no page'


async def fill(dsn: str) -> str:
    """Returns the id of the DAG."""
    async with Engine(dsn, clock=MovableClock(datetime.now(UTC) - timedelta(minutes=150))) as past:
        actions = Actions(past)
        old = await actions.agent("researcher", types=("research", "summarize"), version="1.4")
        await actions.one(
            "research", id=DONE, title="Find competitors", spec={"prompt": "client X"}, tags=["x"]
        )
        first = await actions.take(old)
        await past.work.fail([Failure(ClaimRef(first.id, first.epoch), "no page", traceback=TRACEBACK)])
        await past.revive.retry(DONE)
        again = await actions.take(old)
        await record_step(past, ClaimRef(again.id, again.epoch), "search", b'["one.example"]')
        await actions.complete(again, {"competitors": ["one.example"]}, spent="0.05")
        policy = RetrySpec(strategy="fixed", initial_delay_sec=SLOW, max_delay_sec=SLOW, jitter=False)
        await actions.one("summarize", id=RETRYING, title="Summarize 日本語 texts", retry=policy)
        await actions.fail(await actions.take(old), "timed out", category="timeout")
        await actions.one(
            "research", id=DEAD, title="A title that is far too long for a list of eighty columns"
        )
        await actions.fail(await actions.take(old), "The key has expired", category="auth_failure")
        await actions.one("crawl", id=CANCELLED)
        await past.cancel.cancel(CANCELLED, "no longer needed")
        await actions.one("mail", id=SCHEDULED, run_at=datetime.now(UTC) + timedelta(hours=5, minutes=30))
        await actions.one("sign-off", id=PERSON, required_capabilities=["human"])
        await past.breakers.open("crawl")
        await past.slowdowns.slow_down("model:large", SLOW, "HTTP 429")
        await past.tokens.create("ci", Scope.SUBMIT)
        dag = await past.submission.submit_dag(
            "Quarterly report",
            [
                NewTask("collect", id=COLLECT, key="collect", title="Collect the numbers"),
                NewTask("check", id=CHECK, key="check", depends_on=["collect"]),
                NewTask("write", id=WRITE, key="write", title="Write it up", depends_on=["collect", "check"]),
            ],
            budget_ceiling_usd=5,
            created_by="human:ann",
        )
        # Its lease is long enough to be in force now.
        coder = await actions.agent(
            "coder",
            types=("code",),
            capabilities=("python",),
            budget_usd=45,
            heartbeat_interval_sec=SLOW,
        )
        await actions.one(
            "code",
            id=RUNNING,
            title="Implement the page",
            lock_key="doc:42",
            max_cost_usd=1,
            max_duration_sec=86_400,
        )
        task = await actions.take(coder)
        held = [ClaimRef(task.id, task.epoch)]
        half = b'{"percent": 50}'
        rate = NewRate(amount=100_000, unit="tokens", per_sec=86_400)
        await past.quotas.set(SetQuota(name="large", match="model:large", rate=rate))
        await past.quotas.set(
            SetQuota(name="customers", match="customer:*", each=False, max_running=20, max_waiting=500)
        )
        await past.reservations.acquire(NewReservation(held[0], "model:large", Units(tokens=12_500)))
        await actions.heartbeat("coder", coder.incarnation, held, progress=half, spent=cost("0.2"))
    return dag.id
