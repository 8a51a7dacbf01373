"""The vocabulary of the tests: submit, claim, finish, and read what became of it."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.transition.complete import Acceptance, Completions
from lineshaft.engine.transition.fail import Failures
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.ids import new_id
from lineshaft.model.retry import Uniform
from lineshaft.model.states import Status
from lineshaft.model.tasks import NewTask
from lineshaft.types import AgentInfo, NewAgent, Page, Submitted, SubmittedDag
from lineshaft.types.work import (
    UNREPORTED,
    Cancellation,
    Claim,
    ClaimedTask,
    ClaimRef,
    Completion,
    Failure,
    HeldTask,
    Moved,
    NewCheckpoint,
    NewSpawn,
    NewStep,
    Presence,
    Release,
    Spawned,
    Spent,
)


def cost(amount: str) -> Spent:
    return Spent(Decimal(amount))


async def spawn_children(
    engine: Engine, claim: ClaimRef, tasks: Sequence[NewTask], **options: Any
) -> list[Submitted]:
    (result,) = await engine.work.spawn([NewSpawn(claim, tasks, **options)])
    return list(result.unwrap().submitted)


async def spawn_once(
    engine: Engine, claim: ClaimRef, key: str, tasks: Sequence[NewTask], **options: Any
) -> Spawned:
    (result,) = await engine.work.spawn([NewSpawn(claim, tasks, key, **options)])
    return result.unwrap()


async def release_claims(
    engine: Engine, claims: Sequence[ClaimRef], delay_sec: float | None = None
) -> list[Moved]:
    return await engine.work.release([Release(claim, delay_sec) for claim in claims])


async def cancel_claim(engine: Engine, claim: ClaimRef, reason: str, *, spent: Spent = UNREPORTED) -> Status:
    (moved,) = await engine.work.cancel([Cancellation(claim, reason, spent=spent)])
    return moved.unwrap()


async def record_step(engine: Engine, claim: ClaimRef, name: str, data: bytes) -> bytes:
    (recorded,) = await engine.work.record_steps([NewStep(claim, name, data)])
    return recorded.unwrap()


async def save_checkpoint(engine: Engine, claim: ClaimRef, data: bytes) -> None:
    (saved,) = await engine.work.save_checkpoints([NewCheckpoint(claim, data)])
    if saved.error is not None:
        raise saved.error


def without_gates(engine: Engine) -> Completions:
    """Leaves tasks with gates VALIDATING, as if the process died before it checked their output."""
    transitions = Transitions(engine.database)
    fail = Failures(transitions, Lanes(), engine.breakers, engine.slowdowns)
    return Completions(transitions, Acceptance(transitions, fail, engine.breakers), fail, gates=None)


@dataclass(frozen=True)
class Actions:
    """What clients and agents do, one call each."""

    engine: Engine

    async def submit(self, *tasks: NewTask) -> list[str]:
        return [found.id for found in await self.engine.submission.submit(tasks)]

    async def one(self, type_: str = "code", **fields: Any) -> str:
        (task_id,) = await self.submit(NewTask(type_, **fields))
        return task_id

    async def dag(self, *tasks: NewTask, ceiling: float | None = None) -> SubmittedDag:
        return await self.engine.submission.submit_dag("a DAG", tasks, budget_ceiling_usd=ceiling)

    async def agent(self, agent_id: str | None = None, **fields: Any) -> AgentInfo:
        fields = {"max_concurrent_tasks": 100} | fields
        return await self.engine.fleet.register(NewAgent(id=agent_id or new_id("agent"), **fields))

    async def claims(self, agent: AgentInfo, limit: int = 1, **options: Any) -> Claim:
        options = {"start": True} | options
        return await self.engine.claims.claim(agent.id, agent.incarnation, limit=limit, **options)

    async def claim(self, agent: AgentInfo, limit: int = 1, **options: Any) -> list[ClaimedTask]:
        return (await self.claims(agent, limit, **options)).tasks

    async def take(self, agent: AgentInfo | None = None, **options: Any) -> ClaimedTask:
        """Claim and start the only task that is available."""
        (task,) = await self.claim(agent or await self.agent(), **options)
        return task

    async def complete(self, task: ClaimedTask, output: Any = None, spent: str | None = None) -> Status:
        (moved,) = await self.engine.work.complete([self.completion(task, output, spent)])
        return moved.unwrap()

    @staticmethod
    def completion(task: ClaimedTask, output: Any = None, spent: str | None = None) -> Completion:
        used = Spent(None if spent is None else Decimal(spent))
        return Completion(ref(task), output=msgspec.json.encode(output), spent=used)

    async def fail(
        self, task: ClaimedTask, error: str = "it broke", *, uniform: Uniform = lambda: 0.5, **details: Any
    ) -> Status:
        engine = self.engine
        fail = Failures(
            Transitions(engine.database), Lanes(), engine.breakers, engine.slowdowns, uniform=uniform
        )
        (moved,) = await fail.fail([Failure(ref(task), error, **details)])
        return moved.unwrap()

    async def heartbeat(
        self,
        agent_id: str,
        incarnation: int = 1,
        claims: Sequence[ClaimRef] = (),
        *,
        progress: bytes | None = None,
        spent: Spent = UNREPORTED,
    ) -> dict[str, str]:
        """The answer to each task of an agent: continue, cancel or lost."""
        agent = Presence(agent_id, incarnation)
        held = [HeldTask(claim.id, claim.epoch, agent, progress, spent) for claim in claims]
        answers = await self.engine.work.heartbeat([agent], held)
        assert agent in answers.agents
        return {task.id: "continue" for task in held} | {ended.id: ended.answer for ended in answers.over}

    async def release(self, task: ClaimedTask, delay_sec: float | None = None) -> Status:
        (moved,) = await release_claims(self.engine, [ref(task)], delay_sec=delay_sec)
        return moved.unwrap()

    async def kill(self, agent: AgentInfo, task_id: str | None = None) -> str:
        """Claim a task and make it a dead letter."""
        task = await self.take(agent)
        assert task_id in {None, task.id}
        assert await self.fail(task, "no access", category="auth_failure") is Status.DEAD_LETTERED
        return task.id

    async def finish_all(self, output: Any = "done") -> int:
        """Complete every READY task, and those that become READY thereby; returns how many."""
        agent = await self.agent("finisher")
        count = 0
        while tasks := await self.claim(agent, 100):
            await self.engine.work.complete([self.completion(task, output) for task in tasks])
            count += len(tasks)
        return count


@dataclass(frozen=True)
class World(Actions):
    """Actions, a clock that the test moves, and the tables that the test reads."""

    connection: psycopg.Connection
    clock: MovableClock

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode(), values).fetchall()

    def row(self, query: str, *values: Any) -> dict[str, Any]:
        (found,) = self.rows(query, *values)
        return found

    def status(self, task_id: str) -> str:
        return str(self.task(task_id)["status"])

    def statuses(self, task_ids: Sequence[str]) -> list[str]:
        return [self.status(task_id) for task_id in task_ids]

    def task(self, task_id: str) -> dict[str, Any]:
        """As people see it."""
        return self.row("SELECT * FROM lineshaft.tasks WHERE id = %s", task_id)

    def live(self, task_id: str) -> dict[str, Any]:
        return self.row("SELECT * FROM lineshaft.task_live WHERE id = %s", task_id)

    def end(self, task_id: str) -> dict[str, Any]:
        return self.row("SELECT * FROM lineshaft.task_end WHERE id = %s", task_id)

    def dag_row(self, dag_id: str) -> dict[str, Any]:
        return self.row("SELECT * FROM lineshaft.dag WHERE id = %s", dag_id)

    def agent_row(self, agent: AgentInfo) -> dict[str, Any]:
        """The columns of the agent and of its instance."""
        return self.row(
            "SELECT instance.*, agent.* FROM lineshaft.agent JOIN lineshaft.instance ON agent_id = id"
            " WHERE id = %s AND instance.incarnation = %s",
            agent.id,
            agent.incarnation,
        )

    def lock(self, key: str) -> dict[str, Any] | None:
        found = self.rows("SELECT * FROM lineshaft.lock WHERE key = %s", key)
        return found[0] if found else None

    def attempts(self, task_id: str) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM lineshaft.attempt WHERE task_id = %s ORDER BY epoch", task_id)

    def kinds(self, name: str, *, column: str = "task_id") -> list[str]:
        query = f"SELECT kind FROM lineshaft.events WHERE {column} = %s ORDER BY seq, n"
        return [row["kind"] for row in self.rows(query, name)]

    def dag_kinds(self, dag_id: str) -> list[str]:
        return [kind for kind in self.kinds(dag_id, column="dag_id") if kind.startswith("dag.")]

    def waits(self, task_id: str) -> float:
        """Seconds until it comes back."""
        due = self.live(task_id)["due_at"]
        return float((due - self.clock.now()) / timedelta(seconds=1))

    def everything(self) -> dict[str, list[tuple[Any, ...]]]:
        """All tables that operations on tasks write to, to prove that nothing was changed."""
        tables = (
            "task",
            "task_live",
            "task_end",
            "task_key",
            "edge",
            "dag",
            "attempt",
            "lock",
            "dead_letter",
        )
        return {
            table: self.connection.execute(
                sql.SQL("SELECT t.*::text FROM lineshaft.{} AS t ORDER BY 1").format(sql.Identifier(table))
            ).fetchall()
            for table in (*tables, "step", "checkpoint", "wait", "signal")
        }

    def age(self, **delta: float) -> None:
        self.clock.advance(timedelta(**delta).total_seconds())


def decoded(value: bytes | msgspec.Raw | None) -> Any:
    return None if value is None else json.loads(bytes(value))


def only(moved: Sequence[Moved]) -> Moved:
    (one,) = moved
    return one


def ref(task: ClaimedTask) -> ClaimRef:
    return ClaimRef(task.id, task.epoch)


async def every(read: Callable[[str | None], Awaitable[Page[Any]]], limit: int) -> list[str]:
    """All ids of a list, page by page, past short pages."""
    found: list[str] = []
    cursor = None
    for _ in range(1_000):
        page = await read(cursor)
        assert len(page.items) <= limit
        found += [item.id for item in page.items]
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor
    raise AssertionError("the list has no end")
