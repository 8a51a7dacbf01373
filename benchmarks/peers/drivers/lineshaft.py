"""Lineshaft itself."""

import asyncio

import psycopg

from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload
from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.engine.postgres import migrate

#: Tasks that one agent has in its hands at a time.
SLOTS = 1000
#: The most that one call takes.
CHUNK = 10_000

CLONE_TASKS = """
INSERT INTO lineshaft.task (id, dag_id, type, title, spec)
SELECT 'task_f' || lpad(i::text, 25, '0'), 'dag_f' || lpad(i::text, 25, '0'), type, title, spec
FROM (SELECT * FROM lineshaft.task LIMIT 1) AS one, generate_series(1, %s) AS i
"""
CLONE_LIVE = """
INSERT INTO lineshaft.task_live (id, status, lane_id, rank, ready_at, generation)
SELECT task.id, one.status, one.lane_id, one.rank, one.ready_at, one.generation
FROM (SELECT * FROM lineshaft.task_live LIMIT 1) AS one, lineshaft.task
WHERE task.id LIKE 'task_f%'
"""


def task(n: int, key: str | None = None, depends_on: list[str] | None = None) -> NewTask:
    return NewTask("noop", spec=payload(n), key=key, depends_on=depends_on or [])


class LineshaftDriver(Driver):
    async def setup(self) -> None:
        await asyncio.to_thread(migrate.up, self.dsn)
        self.shaft = await Lineshaft(self.dsn).open()
        self.look = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    async def submit(self, n: int) -> None:
        await self.shaft.submit(task(n))

    async def bulk(self, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, CHUNK):
            await self.shaft.submit_many([task(n) for n in range(first, min(first + CHUNK, numbers.stop))])

    async def left(self) -> int:
        cursor = await self.look.execute("SELECT count(*) FROM lineshaft.task_live")
        ((count,),) = await cursor.fetchall()
        return int(count)

    async def clone(self, copies: int) -> None:
        await self.look.execute(CLONE_TASKS, [copies])
        await self.look.execute(CLONE_LIVE)
        await self.look.execute("VACUUM ANALYZE")

    async def fan(self, width: int) -> None:
        leaves = [str(n) for n in range(1, width + 1)]
        await self.shaft.submit_dag(
            "fan", [*(task(int(leaf), leaf) for leaf in leaves), task(0, "join", leaves)]
        )

    async def chain(self, length: int) -> None:
        await self.shaft.submit_dag(
            "chain", [task(n, str(n), [str(n - 1)] if n else []) for n in range(length)]
        )

    def work(self) -> None:
        agent = Agent(f"worker-{self.worker}", max_concurrent_tasks=SLOTS)

        @agent.task("noop")
        async def noop(prompt: str, n: int) -> None:
            assert prompt == PROMPT  # noqa: S101 - it arrived whole
            self.board.handled(n)

        async def run() -> None:
            async with Lineshaft(self.dsn) as shaft:
                await agent.run(shaft, optimize=True)

        asyncio.run(run())


if __name__ == "__main__":
    main(LineshaftDriver())
