"""The state machine of a task, written once.

Every SQL statement that moves a task performs one row of `TRANSITIONS`, or several in one transaction (a
completion without gates is `SUBMIT_OUTPUT` and `ACCEPT`). A test runs every operation in every state on a
real PostgreSQL and compares the outcome with this table.

            ┌────── block ──────┐   ┌──────── release ────────┐
            │                   ▼   ▼                         │
    CREATED ─► PENDING ─────► READY ─────► CLAIMED ─────► RUNNING ─────► VALIDATING ─────► COMPLETED
               ▲  ▲                           │              │               │
               │  └─ snooze, wait_children, suspend ─────────┤               │
               │                                             ▼               ▼
               │                        READY ◄── RETRYING ◄── FAILED ◄── fail, expire, reject
               │                                               │
               └────────── revive ────────── DEAD_LETTERED ◄───┘

Any task that has not ended can also be CANCELLED; a CANCELLED one can be revived, and a COMPLETED one rerun.
FAILED is transient: the same transaction goes on to RETRYING or DEAD_LETTERED, and the history shows that the
attempt failed.
"""

from enum import StrEnum
from typing import NamedTuple

from lineshaft.errors import InvalidInputError
from lineshaft.model.open_enum import OpenEnum


class Status(OpenEnum):
    """The state of a task. Stored as it is spelled here."""

    #: Accepted, not yet part of a DAG. Exists only within the submitting transaction.
    CREATED = "CREATED"
    #: Waits for dependencies, for children, for a signal, or for its time (`run_at`, a snooze, a sleep).
    PENDING = "PENDING"
    #: Can be claimed by any agent with the required capabilities and enough budget.
    READY = "READY"
    #: An agent holds it and must start it before the lease of the claim expires.
    CLAIMED = "CLAIMED"
    #: The agent works on it and must send heartbeats.
    RUNNING = "RUNNING"
    #: The output is stored and is being checked, by the agent, by a validator, or by a person.
    VALIDATING = "VALIDATING"
    #: Succeeded: the output is stored, and dependents are unblocked.
    COMPLETED = "COMPLETED"
    #: An attempt failed. Transient, before RETRYING or DEAD_LETTERED.
    FAILED = "FAILED"
    #: Waits for `retry_at`, after a failure or a rate limit.
    RETRYING = "RETRYING"
    #: Out of attempts, or not retryable. Waits for a person's decision, without a time limit.
    DEAD_LETTERED = "DEAD_LETTERED"
    #: Will not be done. A person may revive it.
    CANCELLED = "CANCELLED"

    @classmethod
    def parse(cls, text: str) -> "Status":
        """Read a state in any case, as callers may write it."""
        status = cls(text.upper())
        if not status.is_known:
            fault = f"Unknown task state {text!r}; expected one of {', '.join(cls)}."
            raise InvalidInputError(fault, errors=[("status", fault)])
        return status

    @property
    def ended(self) -> bool:
        return self in ENDED


#: A task here has a row in `task_end`; one anywhere else has a row in `task_live`.
ENDED = frozenset({Status.COMPLETED, Status.CANCELLED, Status.DEAD_LETTERED})
#: The states of a committed task that has not ended.
LIVE = frozenset(
    {Status.PENDING, Status.READY, Status.CLAIMED, Status.RUNNING, Status.VALIDATING, Status.RETRYING}
)
#: Exist only inside a transaction; visible in the history only.
TRANSIENT = frozenset({Status.CREATED, Status.FAILED})
#: Why a task with `expire_at_deadline` was CANCELLED: its deadline passed before it completed.
DEADLINE_MISSED = "deadline missed"


class TaskOperation(StrEnum):
    """An operation on a task. Each moves it from one state to exactly one other."""

    JOIN_DAG = "join_dag"
    UNBLOCK = "unblock"
    BLOCK = "block"
    CLAIM = "claim"
    START = "start"
    RELEASE = "release"
    SNOOZE = "snooze"
    WAIT_CHILDREN = "wait_children"
    SUSPEND = "suspend"
    RATE_LIMIT = "rate_limit"
    SUBMIT_OUTPUT = "submit_output"
    ACCEPT = "accept"
    REJECT = "reject"
    FAIL = "fail"
    EXPIRE = "expire"
    SCHEDULE_RETRY = "schedule_retry"
    DEAD_LETTER = "dead_letter"
    PROMOTE = "promote"
    CANCEL = "cancel"
    REVIVE = "revive"
    RERUN = "rerun"
    REPLACE = "replace"
    AWAIT_RERUN = "await_rerun"
    FINISH_BATCH = "finish_batch"
    FAIL_BATCH = "fail_batch"


class Transition(NamedTuple):
    source: Status
    operation: TaskOperation
    target: Status
    event: str


TRANSITIONS: tuple[Transition, ...] = (
    # A new task joins its DAG and, with nothing to wait for, is unblocked immediately.
    Transition(Status.CREATED, TaskOperation.JOIN_DAG, Status.PENDING, "task.created"),
    Transition(Status.PENDING, TaskOperation.UNBLOCK, Status.READY, "task.ready"),
    # A dependency added later blocks a task that has not been claimed yet.
    Transition(Status.READY, TaskOperation.BLOCK, Status.PENDING, "task.waiting"),
    # Held by an agent.
    Transition(Status.READY, TaskOperation.CLAIM, Status.CLAIMED, "task.claimed"),
    Transition(Status.CLAIMED, TaskOperation.START, Status.RUNNING, "task.started"),
    # Released without using an attempt: immediately, after a delay, when spawned children have ended, or when
    # a wait is over.
    Transition(Status.CLAIMED, TaskOperation.RELEASE, Status.READY, "task.released"),
    Transition(Status.RUNNING, TaskOperation.RELEASE, Status.READY, "task.released"),
    Transition(Status.CLAIMED, TaskOperation.SNOOZE, Status.PENDING, "task.released"),
    Transition(Status.RUNNING, TaskOperation.SNOOZE, Status.PENDING, "task.released"),
    Transition(Status.RUNNING, TaskOperation.WAIT_CHILDREN, Status.PENDING, "task.waiting"),
    # A durable sleep, or a wait for a signal.
    Transition(Status.RUNNING, TaskOperation.SUSPEND, Status.PENDING, "task.waiting"),
    Transition(Status.CLAIMED, TaskOperation.RATE_LIMIT, Status.RETRYING, "task.rate_limited"),
    Transition(Status.RUNNING, TaskOperation.RATE_LIMIT, Status.RETRYING, "task.rate_limited"),
    Transition(Status.VALIDATING, TaskOperation.RATE_LIMIT, Status.RETRYING, "task.rate_limited"),
    # Output.
    Transition(Status.RUNNING, TaskOperation.SUBMIT_OUTPUT, Status.VALIDATING, "task.validating"),
    Transition(Status.VALIDATING, TaskOperation.ACCEPT, Status.COMPLETED, "task.completed"),
    Transition(Status.VALIDATING, TaskOperation.REJECT, Status.FAILED, "task.failed"),
    # A failed attempt: the agent reported it, or its lease or time limit expired.
    Transition(Status.CLAIMED, TaskOperation.FAIL, Status.FAILED, "task.failed"),
    Transition(Status.RUNNING, TaskOperation.FAIL, Status.FAILED, "task.failed"),
    Transition(Status.VALIDATING, TaskOperation.FAIL, Status.FAILED, "task.failed"),
    Transition(Status.CLAIMED, TaskOperation.EXPIRE, Status.FAILED, "task.failed"),
    Transition(Status.RUNNING, TaskOperation.EXPIRE, Status.FAILED, "task.failed"),
    Transition(Status.VALIDATING, TaskOperation.EXPIRE, Status.FAILED, "task.failed"),
    Transition(Status.FAILED, TaskOperation.SCHEDULE_RETRY, Status.RETRYING, "task.retry_scheduled"),
    Transition(Status.FAILED, TaskOperation.DEAD_LETTER, Status.DEAD_LETTERED, "task.dead_lettered"),
    Transition(Status.RETRYING, TaskOperation.PROMOTE, Status.READY, "task.ready"),
    # A batch parent has no work of its own: it ends with its children.
    Transition(Status.PENDING, TaskOperation.FINISH_BATCH, Status.COMPLETED, "task.completed"),
    Transition(Status.PENDING, TaskOperation.FAIL_BATCH, Status.DEAD_LETTERED, "task.dead_lettered"),
    # Decisions of people. A revived task waits again for its unfinished dependencies.
    Transition(Status.DEAD_LETTERED, TaskOperation.REVIVE, Status.PENDING, "task.resolved"),
    Transition(Status.CANCELLED, TaskOperation.REVIVE, Status.PENDING, "task.resolved"),
    # A completed task runs again, and tasks that depend on it wait again, also those that are held.
    Transition(Status.COMPLETED, TaskOperation.RERUN, Status.PENDING, "task.resolved"),
    *(
        Transition(source, TaskOperation.AWAIT_RERUN, Status.PENDING, "task.waiting")
        for source in Status
        if source in LIVE and source is not Status.PENDING
    ),
    # A submission with its idempotency key replaces what a waiting task is to do, from the beginning.
    *(
        Transition(source, TaskOperation.REPLACE, Status.PENDING, "task.replaced")
        for source in (Status.PENDING, Status.READY, Status.RETRYING)
    ),
    Transition(Status.DEAD_LETTERED, TaskOperation.CANCEL, Status.CANCELLED, "task.cancelled"),
    *(
        Transition(source, TaskOperation.CANCEL, Status.CANCELLED, "task.cancelled")
        for source in Status
        if source in LIVE
    ),
)
