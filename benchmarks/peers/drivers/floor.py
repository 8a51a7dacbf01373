"""The floor: the plainest SQL with the same promise: a task is committed, claimed, and deleted when done.

No retries, no leases that run out, no events, no history: what a queue adds to this costs something.
"""

import json
from collections.abc import Sequence
from typing import Any

import psycopg

from benchmarks.bare import BARE_CLAIM, BARE_TABLE
from benchmarks.peers.drivers.harness import PROMPT, Driver, main, payload

BATCH = 100
POLL_SEC = 5.0
JOIN_TABLE = "CREATE TABLE public.bare_join (missing int NOT NULL)"
INSERT = "INSERT INTO public.bare (id, status, rank, no, payload) VALUES (%s, 'READY', 50, %s, %s)"
INSERT_AND_WAKE = f"WITH submitted AS ({INSERT}) SELECT pg_notify('bare', '')"
COPY = "COPY public.bare (id, status, rank, no, payload) FROM STDIN"
CLONE = """
INSERT INTO public.bare
SELECT 'copy_' || lpad(i::text, 26, '0'), status, rank, no + i, agent, lease, payload
FROM (SELECT * FROM public.bare LIMIT 1) AS one, generate_series(1, %s) AS i
"""
DELETE = "DELETE FROM public.bare WHERE id = ANY (%s)"
COUNT_DOWN = "UPDATE public.bare_join SET missing = missing - %s RETURNING missing"


def row(n: int, **more: Any) -> tuple[str, int, str]:
    return f"task_{n:026d}", n, json.dumps(payload(n) | more)


class Floor(Driver):
    async def setup(self) -> None:
        self.connection = psycopg.connect(self.dsn, autocommit=True)
        self.connection.execute(BARE_TABLE.encode())
        self.connection.execute(JOIN_TABLE)

    async def submit(self, n: int) -> None:
        self.connection.execute(INSERT, row(n))

    async def submit_and_wake(self, n: int) -> None:
        self.connection.execute(INSERT_AND_WAKE.encode(), row(n))

    async def bulk(self, numbers: range) -> None:
        self._copy([row(n) for n in numbers])

    def _copy(self, rows: Sequence[tuple[str, int, str]]) -> None:
        with self.connection.transaction(), self.connection.cursor().copy(COPY) as copy:
            for id_, n, task in rows:
                copy.write_row((id_, "READY", 50.0, n, task))
        self.connection.execute("NOTIFY bare")

    async def left(self) -> int:
        ((count,),) = self.connection.execute("SELECT count(*) FROM public.bare").fetchall()
        return int(count)

    async def clone(self, copies: int) -> None:
        self.connection.execute(CLONE, [copies])
        self.connection.execute("VACUUM ANALYZE public.bare")

    async def fan(self, width: int) -> None:
        self.connection.execute("INSERT INTO public.bare_join VALUES (%s)", [width])
        self._copy([row(n, joined=True) for n in range(1, width + 1)])

    async def chain(self, length: int) -> None:
        self.connection.execute(INSERT_AND_WAKE.encode(), row(0, length=length))

    def work(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("LISTEN bare")
            while True:
                rows = connection.execute(BARE_CLAIM, [BATCH]).fetchall()
                if not rows:
                    for _ in connection.notifies(timeout=POLL_SEC, stop_after=1):
                        pass
                    continue
                for _, task in rows:
                    assert task["prompt"] == PROMPT  # noqa: S101 - it arrived whole
                    self.board.handled(task["n"])
                _finish(connection, [id_ for id_, _ in rows], rows[0][1])


def _finish(connection: psycopg.Connection, ids: Sequence[str], task: dict[str, Any]) -> None:
    """Delete what is done; what waited for it can begin in the same moment."""
    if "joined" in task:
        with connection.transaction():
            connection.execute(DELETE, [ids])
            ((missing,),) = connection.execute(COUNT_DOWN, [len(ids)]).fetchall()
            if missing == 0:
                connection.execute(INSERT_AND_WAKE.encode(), row(0))
    elif task["n"] + 1 < task.get("length", 0):
        with connection.transaction(), connection.pipeline():
            connection.execute(DELETE, [ids])
            connection.execute(INSERT_AND_WAKE.encode(), row(task["n"] + 1, length=task["length"]))
    else:
        connection.execute(DELETE, [ids])


if __name__ == "__main__":
    main(Floor())
