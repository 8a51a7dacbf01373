"""An installation at work, with something on every page: `python -m tests.dashboard.sample [URL]`."""

import asyncio
import struct
import sys
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from lineshaft import Agent, Fail, Gate, Lineshaft, OutputContract, RetrySpec, TaskContext
from lineshaft.operations import agents
from lineshaft.types import NewAgent, NewTask, Rate, RateUnit
from lineshaft.types.reservations import NewReservation, Units
from lineshaft.types.sources import NewSource, SourceKind
from lineshaft.types.work import ClaimRef, Failure

_SUMMARY_SCHEMA = {
    "type": "object",
    "required": ["title", "publish"],
    "properties": {
        "title": {"type": "string", "description": "As it should appear on the page"},
        "publish": {"type": "boolean"},
        "words": {"type": "integer", "minimum": 1},
        "audience": {"enum": ["customers", "staff"]},
    },
}
#: Calls that fail: the first ones are refused, the others time out. The last one opens the breaker: one more
#: would be tried or not, depending on whether it is claimed before that.
_FAILING, _REFUSED = 5, 1
_TRACE_CAUSE = "connection to crm.example timed out after 30 s (request {number})"


@dataclass(frozen=True)
class Sample:
    """Ids of what was made."""

    dag: str
    completed: str
    dead: str
    to_approve: str
    for_person: str
    running: str
    locked: str
    #: Of the completed task.
    picture: str
    #: Of a group of dead letters.
    pattern: str
    agent: str = "writer"
    source: str = "monday-report"
    quota: str = "large-model"


def _fleet() -> list[Agent]:
    research = Agent("researcher", models=["large"], version="1.4.0")
    writing = Agent("writer", models=["small"], budget_usd=25, version="2.0.1")

    @research.task("research")
    async def search(ctx: TaskContext, topic: str = "") -> dict[str, Any]:
        found = await ctx.step("search the web", _paid, ctx, ["one.example", "two.example"], 0.04)
        ctx.progress({"percent": 60})
        return {"topic": topic, "sources": await ctx.step("read the pages", _paid, ctx, found, 0.11)}

    @research.task("crm-sync")
    async def sync(ctx: TaskContext, number: int = 0) -> None:
        ctx.spend(0.02, tokens_input=300, tokens_output=10)
        if number < _REFUSED:
            raise Fail(f"401: the key of account {number} has expired", "auth_failure")
        raise Fail(_TRACE_CAUSE.format(number=number), "timeout")

    @writing.task("write")
    async def write(ctx: TaskContext, topic: str = "") -> dict[str, Any]:
        text = await ctx.step("draft", _paid, ctx, f"About {topic}: …", 0.08)
        if not ctx.previous_attempts and topic == "prices":
            raise RuntimeError("The model returned an empty answer")
        return {"text": text, "words": 640}

    @writing.task("summarise")
    async def summarise(ctx: TaskContext) -> dict[str, Any]:
        return {"summary": await ctx.step("summarise", _paid, ctx, "Three findings, one risk.", 0.03)}

    return [research, writing]


async def _paid(ctx: TaskContext, result: Any, usd: float) -> Any:
    await asyncio.sleep(0.02)
    ctx.spend(usd, tokens_input=1_200, tokens_output=340)
    return result


def _tasks() -> list[NewTask]:
    quick = RetrySpec(strategy="fixed", initial_delay_sec=0.05, jitter=False)
    review = OutputContract(validation=[Gate("human", {"ask": "Would you publish this?"})])
    topics = ("market", "prices", "competitors")
    return [
        *(
            NewTask(
                type="research",
                key=f"research-{topic}",
                title=f"Research the {topic}",
                spec={"topic": topic},
                max_cost_usd=1,
            )
            for topic in topics
        ),
        *(
            NewTask(
                type="write",
                key=f"write-{topic}",
                title=f"Write about the {topic}",
                spec={"topic": topic},
                depends_on=[f"research-{topic}"],
                retry=quick,
                tags=["report"],
                output=review if topic == "market" else None,
            )
            for topic in topics
        ),
        NewTask(
            type="summarise",
            key="summary",
            title="Summarise the report",
            depends_on=[f"write-{topic}" for topic in topics],
        ),
        NewTask(type="publish", key="publish", title="Publish the report", depends_on=["summary"]),
    ]


async def fill(shaft: Lineshaft) -> Sample:
    """Submit work and let agents do what they can."""
    dag = await shaft.submit_dag(
        "Quarterly market report", _tasks(), budget_ceiling_usd=20, created_by="human:ada"
    )
    for number in range(_FAILING):
        sync = NewTask(
            type="crm-sync", title=f"Copy contacts {number}", spec={"number": number}, max_attempts=1
        )
        await shaft.submit(sync)
    person = await shaft.submit(
        NewTask(
            type="decide",
            title="Choose the headline",
            required_capabilities=["human"],
            output=OutputContract(validation="json-schema", validation_schema=_SUMMARY_SCHEMA),
        )
    )
    later = datetime.now(UTC) + timedelta(hours=5)
    await shaft.submit(NewTask(type="research", title="Weekly news", run_at=later, tags=["weekly"]))
    for agent in _fleet():
        await agent.run(shaft, until_idle=True, handle_signals=False)
    await shaft.submit(NewTask(type="translate", title="Translate into French", priority=2))
    locked = await shaft.submit(NewTask(type="edit", title="Edit the contract", lock_key="contract-17"))
    waiting = await shaft.submit(NewTask(type="edit", title="Proofread the contract", lock_key="contract-17"))
    (editing,) = await hold(shaft, "edit", "editor")
    await shaft.set_quota("large-model", "model:large", rate=Rate(100_000, RateUnit.TOKENS, 60))
    await shaft.set_quota("customers", "customer:*", max_running=3, max_waiting=200)
    await shaft.backend.acquire(NewReservation(editing, "model:large", Units(tokens=64_000)), wait_sec=0)
    await _meet_rate_limit(shaft)
    await shaft.open_breaker("deploy", reason="The host is being moved")
    done = dag.tasks["research-market"].id
    notes = "# Notes\n\nThree vendors share most of the market.\n"
    await shaft.artifacts.put("notes.md", notes.encode(), task=done)
    picture = await shaft.artifacts.put("chart.png", png(120, 80), task=done)
    await shaft.sources.put(
        NewSource(
            name="monday-report",
            kind=SourceKind.SCHEDULE,
            cron="0 9 * * 1",
            timezone="Europe/Berlin",
            template={"task": {"type": "research", "title": "Monday report"}},
        )
    )
    await shaft.pause("translate")
    letters = await shaft.dead_letters()
    groups = await shaft.dead_letter_groups()
    return Sample(
        dag=dag.id,
        completed=done,
        dead=letters.items[0].task_id,
        to_approve=dag.tasks["write-market"].id,
        for_person=person.id,
        running=locked.id,
        locked=waiting.id,
        picture=picture.id,
        pattern=groups[0].pattern,
    )


async def hold(shaft: Lineshaft, type_: str, agent_id: str, **agent: Any) -> list[ClaimRef]:
    """Claim and start what there is of a type, for an instance that sends no heartbeats but stays active."""
    new = NewAgent(
        id=agent_id,
        instance=f"{agent_id}-1",
        host="host-1",
        types=(type_,),
        claim_ttl_sec=3600,
        heartbeat_interval_sec=3600,
        **agent,
    )
    registered = await shaft.backend.call(agents.register_agent, agents.RegisterAgent(agent=new))
    found = await shaft.backend.claim(agent_id, registered.own.incarnation, limit=3, types=[type_])
    return [ClaimRef(item.task.id, item.task.epoch, item.claim_token) for item in found]


async def _meet_rate_limit(shaft: Lineshaft) -> None:
    await shaft.submit(NewTask(type="draw", title="Draw the cover"))
    (claim,) = await hold(shaft, "draw", "illustrator", models_available=("pictures/large",))
    await shaft.backend.fail([Failure(claim, "429 Too Many Requests", "rate_limit", retry_after_sec=900)])


def png(width: int, height: int) -> bytes:
    """A picture: one colour that fades."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(
        b"\0" + b"".join(bytes((40, 90, 255 * x // width)) for x in range(width)) for _ in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


async def main(url: str | None = None) -> None:
    async with Lineshaft(url) as shaft:
        print(await fill(shaft))  # noqa: T201 - its output


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
