"""The swarm's own protocol on the files of a folder, for shell scripts; it needs no queue and no server.

While a mirror keeps the folder, it takes over what happens here: a claim becomes a claim in Lineshaft, and
Lineshaft decides what a result or a failure means. Without one, the rules are those of `attempts`.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from lineshaft.engine.guards.rules import read_breakers
from lineshaft.errors import InvalidInputError, NotFoundError
from lineshaft.integrations.loki import attempts, locks
from lineshaft.integrations.loki.folder import Folder, QueueFile, as_record, read_object, write_object
from lineshaft.integrations.loki.records import (
    COMPLETED,
    HELD_BACK,
    IN_PROGRESS,
    PENDING,
    Record,
    current,
    id_of,
    iso,
    type_of,
)

#: Held by the mirror of a folder for as long as it lives.
MIRROR_LOCK = "state/locks/lineshaft-mirror.lock"
ORCHESTRATOR = "state/orchestrator.json"
BREAKERS = "config/circuit-breakers.yaml"
RATE_LIMITED = "signals/RATE_LIMITED"


class _Open(Struct):
    """A queue file that may be changed."""

    file: QueueFile
    #: What isn't a record stays as it is.
    records: list[Record | Raw]


class Claimer:
    def __init__(self, root: Path, *, wait_sec: float = locks.WAIT_SEC, wrapper: bool = False) -> None:
        self.folder = Folder(root, wrapper=wrapper)
        self._wait_sec = wait_sec

    def claim(self, agent: str, types: Collection[str] = ()) -> Record | None:
        """Take the most urgent record that the agent may have; None: there is none."""
        if agent == HELD_BACK:
            raise InvalidInputError(
                f"An agent can't be called {HELD_BACK}: that name marks records that programs may not claim. "
                "Take another one."
            )
        with self.folder.locked(wait_sec=self._wait_sec):
            if self.folder.paused_by is not None:
                return None
            pending, in_progress = self._open(PENDING), self._open(IN_PROGRESS)
            found = self._best(pending, in_progress, types)
            if found is None:
                return None
            taken = attempts.claimed(found, agent, _now())
            pending.records.remove(found)
            in_progress.records.append(taken)
            # First where it goes to: a process that is killed leaves it in two files rather than in none.
            self._write(IN_PROGRESS, in_progress)
            self._write(PENDING, pending)
            return taken

    def complete(self, task_id: str, result: object) -> attempts.Ended:
        """Move a record with its result to completed, unless its decision report is incomplete."""
        checked = attempts.result_of(result)
        return self._end(
            task_id, lambda record, holder: attempts.completed(record, checked, _now(), held_by=holder)
        )

    def fail(self, task_id: str, error: str) -> attempts.Ended:
        """Report a failed attempt."""
        return self._end(
            task_id, lambda record, holder: attempts.failed(record, error, _now(), held_by=holder)
        )

    def _end(self, task_id: str, decide: Any) -> attempts.Ended:
        with self.folder.locked(wait_sec=self._wait_sec):
            in_progress = self._open(IN_PROGRESS)
            record = _with_id(_records(in_progress), task_id)
            if record is None:
                raise NotFoundError(
                    f"There is no task {task_id} in {self.folder.queue(IN_PROGRESS)}. It was never claimed, "
                    "or somebody else has ended it."
                )
            ended: attempts.Ended = decide(record, HELD_BACK if self._is_mirrored() else None)
            to = self._open(ended.queue)
            to.records.append(ended.record)
            in_progress.records.remove(record)
            self._write(ended.queue, to)
            self._write(IN_PROGRESS, in_progress)
            if ended.rate_limited_sec is not None:
                signal = {"wait": ended.rate_limited_sec, "task": task_id, "at": iso(_now())}
                write_object(self.folder.root / RATE_LIMITED, signal)
            return ended

    def _best(self, pending: _Open, in_progress: _Open, types: Collection[str]) -> Record | None:
        now = _now()
        completed = {id_of(record) for record in _records(self._open(COMPLETED))}
        busy = {type_of(record) for record in _records(in_progress)}
        blocked = attempts.blocked_types(self._breakers(), busy, self._pauses(), now)
        fits = [
            record
            for record in _records(pending)
            if attempts.is_claimable(
                current(record),
                types=types,
                completed={name for name in completed if name},
                blocked_types=blocked,
                now=now,
            )
        ]
        # Equal ones in the order of the file.
        return max(fits, key=attempts.urgency, default=None)

    def _breakers(self) -> Mapping[str, Any]:
        found = read_object(self.folder.root / ORCHESTRATOR).get("circuitBreakers")
        return found if isinstance(found, dict) else {}

    def _pauses(self) -> dict[str, float]:
        path = self.folder.root / BREAKERS
        policy = read_breakers(path) if path.exists() else None
        if policy is None:
            return {}
        overrides = {kind: config.half_open_after_sec for kind, config in policy.overrides.items()}
        return {"*": policy.defaults.half_open_after_sec} | overrides

    def _is_mirrored(self) -> bool:
        with locks.held_alone(self.folder.root / MIRROR_LOCK) as alone:
            return not alone

    def _open(self, name: str) -> _Open:
        file = self.folder.read(name)
        return _Open(file, [as_record(raw) or raw for raw in file.records])

    def _write(self, name: str, opened: _Open) -> None:
        encoded: Sequence[bytes] = [msgspec.json.encode(record) for record in opened.records]
        self.folder.write(name, encoded, opened.file.wrapper)


def _records(opened: _Open) -> list[Record]:
    return [record for record in opened.records if isinstance(record, dict)]


def _with_id(records: Sequence[Record], task_id: str) -> Record | None:
    return next((record for record in records if id_of(record) == task_id), None)


def _now() -> datetime:
    return datetime.now(UTC)
