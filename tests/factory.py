"""Makes a row of any legal state in one call, with everything that belongs to it."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from lineshaft.clock import MovableClock
from lineshaft.ids import new_id
from lineshaft.model.priority import PriorityInputs, rank, rekey_at
from lineshaft.model.states import ENDED, TRANSIENT, Status

_HELD = frozenset({Status.CLAIMED, Status.RUNNING, Status.VALIDATING})


class Factory:
    def __init__(self, connection: psycopg.Connection, clock: MovableClock) -> None:
        self._connection = connection
        self._clock = clock

    def insert(self, table: str, values: Mapping[str, Any]) -> None:
        self._connection.execute(
            sql.SQL("INSERT INTO lineshaft.{} ({}) VALUES ({})").format(
                sql.Identifier(table),
                sql.SQL(", ").join(map(sql.Identifier, values)),
                sql.SQL(", ").join(sql.Placeholder() * len(values)),
            ),
            [Jsonb(value) if isinstance(value, dict) else value for value in values.values()],
        )

    def agent(self, agent_id: str | None = None, **values: Any) -> str:
        agent_id = agent_id or new_id("agent")
        now = self._clock.now()
        role: dict[str, Any] = {
            name: values.pop(name) for name in ("budget_usd", "spent_usd", "type") if name in values
        }
        self.insert("agent", {"id": agent_id, "registered_at": now, "incarnation": 1, **role})
        row = {"registered_at": now, "last_heartbeat": now, "incarnation": 1, "max_concurrent_tasks": 3}
        self.insert("instance", {"agent_id": agent_id, **row, **values})
        return agent_id

    def dag(self, dag_id: str | None = None, **values: Any) -> str:
        dag_id = dag_id or new_id("dag")
        self.insert("dag", {"id": dag_id, "title": "a DAG", "created_at": self._clock.now(), **values})
        return dag_id

    def lane(self, type_: str, boost_per_minute: float) -> int:
        """The lane of tasks that ask for nothing but their type."""
        self._connection.execute(
            "INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute)"
            " VALUES (%s, '{}', '{}', %s) ON CONFLICT DO NOTHING",
            [type_, boost_per_minute],
        )
        row = self._connection.execute(
            "SELECT id FROM lineshaft.lane WHERE type = %s AND boost_per_minute = %s"
            " AND required_capabilities = '{}' AND models = '{}' AND cost_from_usd IS NULL",
            [type_, boost_per_minute],
        ).fetchone()
        assert row is not None
        return int(row[0])

    def task(
        self,
        status: Status = Status.READY,
        *,
        task: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> str:
        """A task in any state that can be seen; `task` and `state` override columns of its rows."""
        if status in TRANSIENT:
            raise ValueError(f"No committed task is ever {status}.")
        now = self._clock.now()
        task_id = (task or {}).get("id") or new_id("task")
        asked = {
            "id": task_id,
            "dag_id": new_id("dag"),
            "type": "code",
            "title": "a task",
            "created_at": now - timedelta(minutes=10),
            "priority": 50,
            "priority_boost_per_minute": 0.1,
            **(task or {}),
        }
        self.insert("task", asked)
        if status in ENDED:
            self.insert("task_end", {**_ended(task_id, status, now), **(state or {})})
        else:
            self.insert("task_live", {**self._live(asked, status, now), **(state or {})})
        if status is Status.VALIDATING:
            self.insert(
                "attempt",
                {
                    "task_id": task_id,
                    "epoch": 1,
                    "number": 1,
                    "claimed_at": now,
                    "outcome": "validating",
                    "output": {"data": "x"},
                },
            )
        if status is Status.DEAD_LETTERED:
            self.insert(
                "dead_letter",
                {
                    "task_id": task_id,
                    "epoch": 1,
                    "dead_lettered_at": now,
                    "total_cost_usd": 0,
                    "category": "crash",
                    "error": "it broke",
                    "pattern": "it broke",
                },
            )
        return str(task_id)

    def _live(self, asked: Mapping[str, Any], status: Status, now: datetime) -> dict[str, Any]:
        ready_at = now - timedelta(minutes=5)
        deadline = asked.get("deadline")
        inputs = PriorityInputs(
            priority=asked["priority"],
            boost_per_minute=asked["priority_boost_per_minute"],
            ready_at=ready_at,
            deadline=deadline,
        )
        row: dict[str, Any] = {
            "id": asked["id"],
            "status": status,
            "lane_id": self.lane(asked["type"], asked["priority_boost_per_minute"]),
            "priority": asked["priority"],
            "is_batch": asked.get("is_batch", False),
            "rank": rank(inputs, now),
            "rekey_at": rekey_at(deadline, now),
        }
        if status is Status.PENDING:
            return row | {"due_at": now + timedelta(minutes=1)}
        row["ready_at"] = ready_at
        if status is Status.RETRYING:
            row |= {"due_at": now + timedelta(minutes=1), "attempts": 1, "epoch": 1, "last_category": "crash"}
        if status in _HELD:
            row |= {
                "epoch": 1,
                "agent_id": self.agent(),
                "incarnation": 1,
                "claimed_at": now,
                "heartbeat_at": now,
                "lease_until": now + timedelta(seconds=60),
            }
        if status in {Status.RUNNING, Status.VALIDATING}:
            row |= {"started_at": now, "first_started_at": now}
        return row


def _ended(task_id: str, status: Status, now: datetime) -> dict[str, Any]:
    row: dict[str, Any] = {"id": task_id, "status": status, "ended_at": now, "epoch": 1}
    if status is Status.COMPLETED:
        return row | {"output": {"answer": 42}, "attempts": 0, "claimed_at": now, "started_at": now}
    if status is Status.DEAD_LETTERED:
        return row | {"reason": "it broke", "category": "crash", "attempts": 3}
    return row | {"reason": "not needed", "epoch": 0}
