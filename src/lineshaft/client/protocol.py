"""What Lineshaft's own client and server say to each other about work, besides the public API.

The public API is for agents in any language: one call a task, everything spelled out. A process with many
agents in Python asks for the same in batches: one heartbeat for all it holds, outcomes together, claims that
are started at once and come with nothing but what a handler needs. `interfaces/http/crews.py` answers.
"""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Self

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from lineshaft.model.budget import money
from lineshaft.model.storable import readable_json, replace_unstorable
from lineshaft.model.tasks import NewTask
from lineshaft.types.work import (
    MAX_ERROR,
    Child,
    Claim,
    ClaimedTask,
    ClaimRef,
    Completion,
    Failure,
    HeldTask,
    PastAttempt,
    Presence,
    Release,
    RemainingBudgets,
    Resumed,
    Spent,
)

MAX_ITEMS = 10_000

Name = Annotated[str, Meta(min_length=1, max_length=1_000)]
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Incarnation = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=365 * 86_400)]
Tokens = Annotated[int, Meta(ge=0, le=2**62)]
Names = Annotated[list[Name], Meta(max_length=1_000)]
#: JSON that may be left out; null is a value like any other.
Json = Raw | UnsetType


def json_of(given: Json) -> bytes | None:
    return None if given is UNSET else bytes(given)


def _readable(name: str, given: Json) -> bytes | None:
    return None if given is UNSET else readable_json(name, bytes(given))


def raw_of(json: bytes | None) -> Json:
    return UNSET if json is None else Raw(json)


def _sum(given: Decimal | None) -> Decimal | None:
    return None if given is None else money(given, "cost_usd")


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Used(Body, frozen=True, kw_only=True):
    """What an attempt has used since its claim."""

    cost_usd: Decimal | None = None
    tokens_input: Tokens = 0
    tokens_output: Tokens = 0

    @classmethod
    def of(cls, spent: Spent) -> Self:
        return cls(
            cost_usd=spent.cost_usd, tokens_input=spent.tokens_input, tokens_output=spent.tokens_output
        )

    @property
    def spent(self) -> Spent:
        return Spent(_sum(self.cost_usd), self.tokens_input, self.tokens_output)


_NOTHING = Used()


class Held(Body, frozen=True, kw_only=True):
    """One claim of a task: the epoch fences every call about it."""

    id: Name
    epoch: Epoch

    @property
    def claim(self) -> ClaimRef:
        return ClaimRef(self.id, self.epoch)


# Who is there.


class Member(Body, frozen=True, kw_only=True):
    """One incarnation of an agent."""

    agent_id: Name
    incarnation: Incarnation


class HeldBeat(Held, frozen=True, kw_only=True):
    agent_id: Name
    progress: Json = UNSET
    #: Since the claim.
    cost_usd: Decimal | None = None


class CrewBeat(Body, frozen=True, kw_only=True):
    """The heartbeat of a process: all its agents, and all they hold."""

    agents: Annotated[list[Member], Meta(max_length=MAX_ITEMS)]
    tasks: Annotated[list[HeldBeat], Meta(max_length=MAX_ITEMS)]

    @property
    def presences(self) -> list[Presence]:
        return [Presence(agent.agent_id, agent.incarnation) for agent in self.agents]

    @property
    def held(self) -> list[HeldTask]:
        return [
            HeldTask(
                beat.id,
                beat.epoch,
                beat.agent_id,
                _readable("progress", beat.progress),
                _sum(beat.cost_usd),
            )
            for beat in self.tasks
        ]


# Getting work.


class Wait(Member, frozen=True, kw_only=True):
    types: Names
    wait_sec: Annotated[float, Meta(ge=0, le=60)]


class Woken(Struct, frozen=True):
    #: There may be something to do; false: the time was up.
    work: bool


class ClaimWork(Member, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1_000)]
    types: Names


class Started(Struct, frozen=True, kw_only=True):
    """A task that was claimed and started, with what its handler is given."""

    id: str
    epoch: int
    #: Null while the DAG is a standalone task's own.
    live_dag_id: str | None
    lock_key: str | None
    model: str | None
    attempts: int
    rate_limits: int
    cost_usd: Decimal
    limit_sec: float
    heartbeat_interval_sec: float
    resume: bool
    type: str
    title: str
    spec: Raw
    dag_id: str
    parent_id: str | None
    deadline: datetime | None
    max_attempts: int
    max_cost_usd: Decimal | None
    require_decision_report: bool
    started: bool
    claimed_at: datetime
    claim_ttl_sec: float


_STARTED = tuple(name for name in Started.__struct_fields__ if name != "spec")


class Left(Struct, frozen=True, kw_only=True):
    """What earlier attempts at a task left behind."""

    checkpoint: Json = UNSET
    steps: Json = UNSET
    children: Json = UNSET
    attempts: list[PastAttempt] = []


class Work(Struct, frozen=True, kw_only=True):
    tasks: list[Started]
    #: By task.
    left: dict[str, Left] = {}
    #: Outputs that specs refer to, by the task whose they are; null: it has none.
    inputs: dict[str, Raw] = {}

    @classmethod
    def of(cls, claim: Claim, past: dict[str, list[PastAttempt]]) -> Self:
        return cls(
            tasks=[
                Started(**{name: getattr(task, name) for name in _STARTED}, spec=Raw(task.spec))
                for task in claim.tasks
            ],
            left={
                name: Left(
                    checkpoint=raw_of(found.checkpoint),
                    steps=raw_of(found.steps),
                    children=raw_of(found.children),
                    attempts=past.get(name, []),
                )
                for name, found in claim.resumed.items()
            },
            inputs={name: Raw(json or b"null") for name, json in claim.inputs.items()},
        )

    @property
    def claim(self) -> Claim:
        tasks = [
            ClaimedTask(**{name: getattr(task, name) for name in _STARTED}, spec=bytes(task.spec), gates=None)
            for task in self.tasks
        ]
        resumed = {
            name: Resumed(
                name,
                checkpoint=json_of(left.checkpoint),
                steps=json_of(left.steps),
                children=json_of(left.children),
            )
            for name, left in self.left.items()
        }
        return Claim(tasks, resumed, {name: bytes(json) for name, json in self.inputs.items()})

    @property
    def past(self) -> dict[str, list[PastAttempt]]:
        return {name: left.attempts for name, left in self.left.items()}


# Handing in.


class Completed(Held, frozen=True, kw_only=True):
    output: Json = UNSET
    artifacts: Json = UNSET
    decision_report: Json = UNSET
    output_type: Name | None = None
    used: Used = _NOTHING

    @classmethod
    def of(cls, given: Completion) -> Self:
        return cls(
            id=given.claim.id,
            epoch=given.claim.epoch,
            output=raw_of(given.output),
            artifacts=raw_of(given.artifacts),
            decision_report=raw_of(given.decision_report),
            output_type=given.output_type,
            used=Used.of(given.spent),
        )

    @property
    def completion(self) -> Completion:
        return Completion(
            self.claim,
            _readable("output", self.output),
            _readable("artifacts", self.artifacts),
            _readable("decision_report", self.decision_report),
            self.used.spent,
            self.output_type,
        )


class Completions(Body, frozen=True, kw_only=True):
    items: Annotated[list[Completed], Meta(min_length=1, max_length=MAX_ITEMS)]


class Failed(Held, frozen=True, kw_only=True):
    error: str
    category: Name | None = None
    retry_after_sec: Seconds | None = None
    used: Used = _NOTHING

    @classmethod
    def of(cls, given: Failure) -> Self:
        return cls(
            id=given.claim.id,
            epoch=given.claim.epoch,
            # As it is stored: not every text of Python's is one of JSON's.
            error=replace_unstorable(given.error[:MAX_ERROR]),
            category=None if given.category is None else replace_unstorable(given.category),
            retry_after_sec=given.retry_after_sec,
            used=Used.of(given.spent),
        )

    @property
    def failure(self) -> Failure:
        return Failure(self.claim, self.error, self.category, self.retry_after_sec, self.used.spent)


class Failures(Body, frozen=True, kw_only=True):
    items: Annotated[list[Failed], Meta(min_length=1, max_length=MAX_ITEMS)]


class HandedBack(Held, frozen=True, kw_only=True):
    delay_sec: Seconds | None = None
    used: Used = _NOTHING

    @classmethod
    def of(cls, given: Release) -> Self:
        return cls(
            id=given.claim.id,
            epoch=given.claim.epoch,
            delay_sec=given.delay_sec,
            used=Used.of(given.spent),
        )

    @property
    def hand_back(self) -> Release:
        return Release(self.claim, self.delay_sec or None, self.used.spent)


class HandBacks(Body, frozen=True, kw_only=True):
    items: Annotated[list[HandedBack], Meta(min_length=1, max_length=MAX_ITEMS)]


class CancelHeld(Held, frozen=True, kw_only=True):
    reason: Annotated[str, Meta(max_length=10_000)]
    used: Used = _NOTHING


# While it works.


class StepDone(Held, frozen=True, kw_only=True):
    name: Name
    data: Raw
    cost_usd: Decimal
    cost_so_far_usd: Decimal

    @property
    def json(self) -> bytes:
        return readable_json("data", bytes(self.data))

    @property
    def costs(self) -> tuple[Decimal, Decimal]:
        return money(self.cost_usd, "cost_usd"), money(self.cost_so_far_usd, "cost_so_far_usd")


class StepKept(Struct, frozen=True):
    #: What counts: the first result that was recorded.
    data: Raw
    #: What is left to spend.
    purses: RemainingBudgets


class CrewCheckpoint(Held, frozen=True, kw_only=True):
    data: Raw

    @property
    def json(self) -> bytes:
        return readable_json("data", bytes(self.data))


class Spawn(Held, frozen=True, kw_only=True):
    #: Children are created once for each.
    key: Name
    tasks: list[NewTask]
    wait: bool
    used: Used = _NOTHING


class Children(Struct, frozen=True):
    children: list[Child]
    #: The claim is over: the parent is claimed again when all of them have ended.
    paused: bool


# What is due.


class Kept(Struct, frozen=True):
    #: Seconds until there is something to do again; null: nothing is known.
    next_sec: float | None


class Retries(Body, frozen=True, kw_only=True):
    types: Names
    within_sec: Seconds


class RetryDue(Struct, frozen=True):
    #: Seconds until the first of them; null: there is none.
    due_sec: float | None


#: Money in full; the server reads texts and numbers alike.
encode = msgspec.json.Encoder().encode
