"""One process of a chaos run: an agent of its own, and a replica of one that all of them share.

`python -m tests.chaos.worker`. Both do what the plan in a task's spec says, and record every claim they get,
every step they run, and every write with its answer.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from lineshaft import Agent, Cancel, Fail, Lineshaft, NewTask, Snooze, TaskContext
from lineshaft.client.backend import Backend, Waited, WorkWaiter
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.client.http_backend import HttpBackend
from lineshaft.errors import LineshaftError, SupersededError
from lineshaft.settings import Settings
from lineshaft.types import InstanceInfo
from lineshaft.types.assignments import Assignment
from lineshaft.types.work import (
    Cancellation,
    ClaimedTask,
    ClaimRef,
    Completion,
    Failure,
    Moved,
    NewStep,
    Release,
    RemainingBudgets,
    Spawned,
    Spent,
    decoded_inputs,
)
from tests.chaos import dump, wall_clock
from tests.chaos.history import Recorder
from tests.chaos.workload import ABSURD_USD, FLAKY, MAX_COST_USD, RETRY, TYPE

#: Of the agent that each process has a replica of: one may get what another has lost.
SHARED = "replicated"
#: It never runs out, but each claim reserves from it.
SHARED_BUDGET_USD = 1000.0


class RecordingWaiter:
    """A waiter, and a record of what it has claimed."""

    def __init__(
        self, inner: WorkWaiter, record: Callable[[Sequence[Assignment[ClaimedTask]]], None]
    ) -> None:
        self._inner = inner
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def wait(self, timeout: float, **wanted: Any) -> Waited | None:  # noqa: ASYNC109
        waited = await self._inner.wait(timeout, **wanted)
        self._record(() if waited is None else waited.assignments)
        return waited


class RecordingBackend:
    """A backend, and a record of what went through it. What isn't recorded passes as it is."""

    def __init__(self, inner: Backend, record: Recorder) -> None:
        self._inner = inner
        self._record = record
        #: The agent and the incarnation of each claim that was made here.
        self._holders: dict[tuple[str, int], tuple[str, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def claim(
        self, agent_id: str, incarnation: int, *, limit: int, types: Sequence[str]
    ) -> list[Assignment[ClaimedTask]]:
        found = await self._inner.claim(agent_id, incarnation, limit=limit, types=types)
        self._claimed(found, agent_id, incarnation)
        return found

    @contextlib.asynccontextmanager
    async def waiter(self, agent_id: str, own: InstanceInfo) -> AsyncIterator[WorkWaiter]:
        async with self._inner.waiter(agent_id, own) as waiter:
            yield cast(
                "WorkWaiter",
                RecordingWaiter(waiter, lambda found: self._claimed(found, agent_id, own.incarnation)),
            )

    def _claimed(self, found: Sequence[Assignment[ClaimedTask]], agent_id: str, incarnation: int) -> None:
        for each in found:
            self._holders[each.task.id, each.task.epoch] = agent_id, incarnation
            self._record(
                "claimed",
                task=each.task.id,
                epoch=each.task.epoch,
                agent=agent_id,
                incarnation=incarnation,
                steps=sorted(each.steps),
                # By id: the checker doesn't know the names.
                inputs={
                    f"task:{of}:output": each.inputs[name]
                    for name, of in decoded_inputs(each.task.inputs).items()
                },
            )

    async def complete(self, completions: Sequence[Completion]) -> list[Moved]:
        reported = [
            _reported(item.claim, item.spent) | {"output": _json(item.output)} for item in completions
        ]
        return await self._moving("complete", reported, lambda: self._inner.complete(completions))

    async def complete_and_claim(
        self, item: Completion, *, types: Sequence[str]
    ) -> tuple[Moved, list[Assignment[ClaimedTask]]]:
        reported = _reported(item.claim, item.spent) | {"output": _json(item.output)}
        found: list[Assignment[ClaimedTask]] = []

        async def call() -> list[Moved]:
            moved, claimed = await self._inner.complete_and_claim(item, types=types)
            found.extend(claimed)
            return [moved]

        (moved,) = await self._moving("complete", [reported], call)
        self._claimed(found, *self._holders[item.claim.id, item.claim.epoch])
        return moved, found

    async def fail(self, failures: Sequence[Failure]) -> list[Moved]:
        reported = [_reported(item.claim, item.spent) | {"error": item.error} for item in failures]
        return await self._moving("fail", reported, lambda: self._inner.fail(failures))

    async def release(self, items: Sequence[Release]) -> list[Moved]:
        reported = [_reported(item.claim, item.spent) for item in items]
        return await self._moving("release", reported, lambda: self._inner.release(items))

    async def _moving(self, what: str, items: list[dict[str, Any]], call: Callable[[], Any]) -> list[Moved]:
        name = self._asked(what, items=items)
        with self._failing(name):
            moved: list[Moved] = await call()
        self._record(
            "answered",
            call=name,
            statuses=[None if one.status is None else one.status.value for one in moved],
            errors=[None if one.error is None else one.error.code for one in moved],
        )
        return moved

    async def record_step(self, step: NewStep) -> tuple[bytes, RemainingBudgets]:
        call = self._asked(
            "step",
            task=step.claim.id,
            epoch=step.claim.epoch,
            name=step.name,
            data=_json(step.data),
            cost=str(step.cost_usd),
        )
        with self._failing(call):
            stored, purses = await self._inner.record_step(step)
        self._record("answered", call=call, stored=_json(stored))
        return stored, purses

    async def spawn(
        self, claim: ClaimRef, key: str, tasks: Sequence[NewTask], *, wait: bool, spent: Spent
    ) -> Spawned:
        call = self._asked("spawn", task=claim.id, epoch=claim.epoch, key=key)
        with self._failing(call):
            spawned = await self._inner.spawn(claim, key, tasks, wait=wait, spent=spent)
        self._record("answered", call=call, children=[child.id for child in spawned.children])
        return spawned

    async def cancel_held(self, items: Sequence[Cancellation]) -> list[Moved]:
        moved = []
        for item in items:
            call = self._asked("cancel_held", task=item.claim.id, epoch=item.claim.epoch)
            with self._failing(call):
                (one,) = await self._inner.cancel_held([item])
                one.unwrap()
            self._record("answered", call=call)
            moved.append(one)
        return moved

    def _asked(self, what: str, **facts: Any) -> str:
        name = self._record.next_call()
        self._record(what, call=name, **facts)
        return name

    @contextlib.contextmanager
    def _failing(self, call: str) -> Any:
        try:
            yield
        except BaseException as error:
            code = error.code if isinstance(error, LineshaftError) else type(error).__name__
            self._record("refused", call=call, code=code, error=str(error)[:300])
            raise


def _reported(claim: ClaimRef, spent: Spent) -> dict[str, Any]:
    return {
        "task": claim.id,
        "epoch": claim.epoch,
        "cost": None if spent.cost_usd is None else str(spent.cost_usd),
    }


def _json(data: bytes | None) -> Any:
    return None if data is None else msgspec.json.decode(data)


def make_agent(agent_id: str, record: Recorder, scratch: Path, *, budget_usd: float | None) -> Agent:
    agent = Agent(
        agent_id,
        max_concurrent_tasks=4,
        budget_usd=budget_usd,
        heartbeat_interval_sec=1.0,
        poll_interval_sec=0.5,
        grace_sec=2,
    )

    async def work(ctx: TaskContext, plan: dict[str, Any]) -> Any:
        record("begun", task=ctx.id, epoch=ctx.epoch, attempt=ctx.attempt)
        cost = plan.get("cost", 0)

        async def step(name: str) -> dict[str, Any]:
            record("ran_step", task=ctx.id, epoch=ctx.epoch, name=name)
            ctx.spend(cost)
            return {"by": ctx.agent_id, "epoch": ctx.epoch}

        for n in range(plan.get("steps", 0)):
            await ctx.step(f"step-{n}", step, f"step-{n}")
        if plan.get("spawns"):
            children = [
                NewTask(
                    TYPE,
                    spec={"plan": {"seconds": 0.02, "cost": cost}},
                    retry=RETRY,
                    max_attempts=6,
                    max_cost_usd=MAX_COST_USD,
                )
                for _ in range(plan["spawns"])
            ]
            await ctx.spawn("children", children, wait=plan["waits"])
        await asyncio.sleep(plan.get("seconds", 0))
        if plan.get("cancels"):
            raise Cancel("the plan says so")
        if plan.get("snoozes") and not any(past.outcome == "released" for past in ctx.previous_attempts):
            raise Snooze(0.2)
        failed = sum(past.outcome == "failed" for past in ctx.previous_attempts)
        if failed < plan.get("fails", 0):
            raise Fail("the plan says so", plan.get("category", "crash"))
        # Something on the agent's own disk, as real agents have; a full one fails the attempt.
        draft = scratch / f"{ctx.id}.{ctx.epoch}"
        try:
            draft.write_bytes(os.urandom(2048))
        finally:
            draft.unlink(missing_ok=True)
        ctx.spend(ABSURD_USD if plan.get("exaggerates") else cost)
        if plan.get("wrong_first") and not failed:
            return {"wrong": True}
        return {"task": ctx.id, "epoch": ctx.epoch, "by": ctx.agent_id, "nonce": os.urandom(8).hex()}

    for kind in (TYPE, FLAKY):
        agent.task(kind)(work)
    return agent


def _backend(where: str) -> Backend:
    if where.startswith("http://"):
        return HttpBackend(where, os.environ.get("LINESHAFT_TOKEN"))
    settings = Settings.load(os.environ | {"LINESHAFT_DATABASE_URL": where})
    return DatabaseBackend(settings, max_connections=4)


async def run_all(agents: Sequence[Agent], shaft: Lineshaft, stopped: asyncio.Event) -> None:
    """Until all have stopped, or one has failed."""
    running = [asyncio.create_task(agent.run(shaft, handle_signals=False)) for agent in agents]
    await asyncio.sleep(0)
    if stopped.is_set():
        # Before they ran: an agent that doesn't run can't be stopped.
        for agent in agents:
            agent.stop()
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("where", help="a DSN, or the URL of a server")
    parser.add_argument("history", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--clock", type=Path, help="a file with the seconds that its clock is off")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    record = Recorder(args.history / f"{args.name}.jsonl", args.name)
    record("started")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    agents = [
        make_agent(name, record, args.scratch, budget_usd=budget)
        for name, budget in ((args.name, args.budget), (SHARED, SHARED_BUDGET_USD))
    ]

    def stop() -> None:
        stopped.set()
        for agent in agents:
            agent.stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    dump.install(loop)
    if args.clock is not None:
        wall_clock.install(args.clock)
    while not stopped.is_set():
        backend = RecordingBackend(_backend(args.where), record)
        try:
            async with Lineshaft(backend=cast(Backend, backend)) as shaft:
                await run_all(agents, shaft, stopped)
        except SupersededError as error:
            record("superseded", error=str(error))
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent is needed again
            record("interrupted", error=f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(0.2)
    record("stopped")


if __name__ == "__main__":
    asyncio.run(main())
