"""What a task is waiting for, derived from the same rows that a claim reads; what it is doing; how it ended.

`claim_tasks` decides what can be claimed; this module explains it. A READY task is `runnable` if the claim of
at least one active agent would get it in its turn: its place in the queue is not a reason. One agent must
pass all tests: a free agent without money and a busy agent with money don't add up.
"""

import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
from msgspec import Struct

from lineshaft.checks.registry import HUMAN
from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader, Row
from lineshaft.engine.read.tasks import ended_above, read_upstream
from lineshaft.errors import (
    AlreadyClaimedError,
    BudgetExceededError,
    CapabilityMismatchError,
    InvalidTransitionError,
    LineshaftError,
    NotClaimableError,
)
from lineshaft.model.instance_names import short_names
from lineshaft.model.states import DEADLINE_MISSED, Status
from lineshaft.types import Reason, ReasonCode, Why

#: Holders of locks that are not tasks begin with this (guards/outside.py).
OUTSIDE = "outside:"
#: This many items of a list are named; the rest are counted.
_NAMED = 3
#: Characters of an error that are shown.
_ERROR = 300
#: Characters of a progress report that are shown.
_PROGRESS = 200
#: From here on fractions of a second don't matter.
_WHOLE_SECONDS = 10

_SQL = catalog.load(__name__)


class _Facts(Struct, frozen=True):
    task: Row
    upstream: list[Row]
    models: list[Row]
    agents: list[Row]

    def explained(self) -> Why:
        return explain(self.task, self.upstream, self.models, self.agents)


async def read_why(reader: Reader, task_id: str) -> Why | None:
    """None: unknown task."""
    facts = await _read_facts(reader, task_id)
    return None if facts is None else facts.explained()


async def read_reasons(reader: Reader, task_ids: Sequence[str]) -> dict[str, str]:
    """Why these tasks can't be claimed now, each in one sentence; those that can be are missing.

    For lists: of agents that can do the same, only the one with the most money is considered.
    """
    tasks = await reader.send(_SQL["why_task"], ids=list(task_ids))
    upstream = await read_upstream(reader, list(task_ids))
    models, agents = await read_agents_and_models(reader)
    profiles = distinct_profiles(agents)
    found = [explain(task, upstream, models, profiles) for task in await tasks.fetchall()]
    return {why.task_id: why.reasons[0].detail for why in found if why.reasons and not why.runnable}


async def read_refusal(
    reader: Reader, task_id: str, agent_id: str, incarnation: int
) -> LineshaftError | None:
    """Why this instance of an agent can't claim this task; None: unknown task."""
    facts = await _read_facts(reader, task_id, agent_id, incarnation)
    return None if facts is None else _refusal(facts.explained(), facts.agents[0])


async def read_agents_and_models(reader: Reader) -> tuple[list[Row], list[Row]]:
    """The rows of why_models and of why_agents, for `explain`."""
    models = await reader.send(_SQL["why_models"])
    agents = await _send_agents(reader, None, None)
    return await models.fetchall(), await agents()


async def _send_agents(
    reader: Reader, agent_id: str | None, incarnation: int | None
) -> Callable[[], Awaitable[list[Row]]]:
    """The rows of why_agents; each with the full quotas of all agents and models by key."""
    keys = await reader.send(_SQL["why_full_keys"])
    agents = await reader.send(_SQL["why_agents"], agent_id=agent_id, incarnation=incarnation)

    async def rows() -> list[Row]:
        full = {row["key"]: row["quotas"] for row in await keys.fetchall()}
        return [row | {"full_keys": full} for row in await agents.fetchall()]

    return rows


async def _read_facts(
    reader: Reader, task_id: str, agent_id: str | None = None, incarnation: int | None = None
) -> _Facts | None:
    """`agent_id`: None considers all agents."""
    task = await reader.send(_SQL["why_task"], ids=[task_id])
    models = await reader.send(_SQL["why_models"])
    agents = await _send_agents(reader, agent_id, incarnation)
    upstream = await read_upstream(reader, [task_id])
    found = await task.fetchall()
    if not found:
        return None
    return _Facts(found[0], upstream, await models.fetchall(), await agents())


def distinct_profiles(agents: Iterable[Row]) -> list[Row]:
    """For each set of abilities, the instance with the most money: thousands of others may have the same."""
    best: dict[tuple[object, ...], Row] = {}
    for row in agents:
        types = row["types"] if row["types"] is None else tuple(row["types"])
        free = row["held"] < row["max_concurrent_tasks"]
        closed = (row["slowed_until"], row["is_closed"], row["closed_until"] if row["is_closed"] else None)
        key = (
            *(row["status"], types, tuple(row["capabilities"]), tuple(row["models_available"]), free),
            *(f"agent:{row['id']}" in row["full_keys"], closed),
        )
        known = best.setdefault(key, row)
        if known["money"] is not None and (row["money"] is None or row["money"] > known["money"]):
            best[key] = row
    return list(best.values())


def explain(task: Row, upstream: Sequence[Row], models: Iterable[Row], agents: Sequence[Row]) -> Why:
    """From a row of why_task and the rows of upstream, why_models and why_agents."""
    status = Status(task["status"])
    reasons: list[Reason] = []
    if status is Status.PENDING:
        reasons = [*_dependencies(task, upstream), *_schedule(task)]
    elif status is Status.RETRYING:
        reasons = [_retry(task)]
    elif status is Status.VALIDATING:
        reasons = [_gate(task)]
    elif status in {Status.CLAIMED, Status.RUNNING}:
        reasons = [_held(task, status)]
    elif status.ended and task["end_reason"] != DEADLINE_MISSED:
        reasons = [_ended(task, status)]
    elif status is Status.READY:
        named = {*task["models"], *(model for row in agents for model in row["models_available"])}
        unusable = _unusable(named, list(models))
        reasons = [
            *_guards(task),
            *_quotas(task),
            *_daily_budget(task),
            *_dag_budget(task),
            *_agents(task, unusable, agents),
        ]
    # The promoter is about to cancel a task that has expired. One that is merely late runs like any other.
    runnable = status is Status.READY and not reasons and not task["expired"]
    reasons += _deadline(task, status)
    return Why(runnable, reasons, status, task["id"])


def _unusable(models: Iterable[str], barred: Sequence[Row]) -> dict[str, datetime | None]:
    """Models that no claim uses, with the end of their slowdown; None: their breaker is open."""
    unusable: dict[str, datetime | None] = {}
    for model in models:
        keys = {f"model:{model}", f"provider:{model.partition('/')[0]}"}
        ends = [row["until"] for row in barred if row["key"] in keys]
        if ends:
            # An open breaker outlasts a slowdown.
            unusable[model] = None if None in ends else max(ends)
    return unusable


def _refusal(why: Why, agent: Row) -> LineshaftError:
    """The error for an agent that asked for this task by id; `why` considered no other agent."""
    asked = f"Agent {agent['id']} can't claim task {why.task_id}"
    details = " ".join(reason.detail for reason in why.reasons)
    codes = {reason.code for reason in why.reasons}
    if why.status in {Status.CLAIMED, Status.RUNNING, Status.VALIDATING}:
        return AlreadyClaimedError(f"{asked}: it is {why.status}, held by another claim.")
    if why.status is not Status.READY:
        return InvalidTransitionError(f"{asked}: it is {why.status}, not READY. {details}".rstrip())
    if why.runnable:
        return AlreadyClaimedError(f"{asked}: another claim was faster. Look at the task, or try again.")
    incapable = codes & {ReasonCode.NO_CAPABLE_AGENT, ReasonCode.WAITING_APPROVAL}
    if incapable and agent["status"] == "active":
        return CapabilityMismatchError(f"{asked}. {details}")
    if codes & {ReasonCode.NO_AFFORDABLE_AGENT, ReasonCode.DAG_BUDGET, ReasonCode.DAILY_BUDGET}:
        return BudgetExceededError(f"{asked}. {details}")
    return NotClaimableError(
        f"{asked}. {details}", reasons=[(reason.code, reason.detail) for reason in why.reasons]
    )


def _dependencies(task: Row, upstream: Sequence[Row]) -> Iterable[Reason]:
    direct = [edge for edge in upstream if edge["task_id"] == task["id"]]
    if direct:
        states = _listed(f"{edge['depends_on']} ({edge['status'] or 'gone'})" for edge in direct)
        what = "other tasks"
        if task["is_batch"] and not task["is_childless"]:
            what = "its children"
        elif task["list"] is not None:
            what = f"the list {task['list']}"
        elif task["turns"] is not None:
            what = f"its turn, because at most {task['turns']} children of its list run at once"
        advice = ""
        if cancelled := [e["depends_on"] for e in direct if e["status"] == Status.CANCELLED]:
            advice = f" {_listed(cancelled)} will never complete unless retried; cancel this task otherwise."
        yield Reason(ReasonCode.BLOCKED_BY_DEPENDENCY, f"Waits for {what}: {states}.{advice}")
    if dead := ended_above(upstream, Status.DEAD_LETTERED).get(task["id"]):
        yield Reason(
            ReasonCode.UPSTREAM_DEAD_LETTERED,
            f"Dead letters upstream: {_listed(dead)}. They wait for a decision: retry or modify them to "
            "continue; cancel them to cancel this task too.",
        )


def _deadline(task: Row, status: Status) -> Iterable[Reason]:
    deadline = task["deadline"]
    if deadline is None or deadline > task["now"]:
        return
    missed = f"Its deadline {_iso(deadline)} has passed"
    if status is Status.CANCELLED and task["end_reason"] == DEADLINE_MISSED:
        yield Reason(
            ReasonCode.DEADLINE_MISSED,
            f"{missed}, and it has expire_at_deadline: it was cancelled. Change its deadline, then retry it.",
        )
    elif status not in {Status.PENDING, Status.READY, Status.RETRYING}:
        return
    elif task["expired"]:
        yield Reason(
            ReasonCode.DEADLINE_MISSED,
            f"{missed}, and it has expire_at_deadline: no claim gets it, and the promoter cancels it at its "
            "next tick. Change its deadline to keep it.",
        )
    else:
        yield Reason(
            ReasonCode.DEADLINE_MISSED,
            f"{missed}: it is late, and runs all the same. Cancel it if it is of no use any more.",
        )


def _schedule(task: Row) -> Iterable[Reason]:
    if task["wait_name"] is not None:
        yield _wait(task)
    elif task["due_at"] is not None:
        replaced = task["replaced_at"]
        because = (
            ""
            if replaced is None
            else f" A submission with its idempotency key replaced it at {_iso(replaced)}."
        )
        yield Reason(ReasonCode.SCHEDULED, f"Scheduled for {_when(task['due_at'], task['now'])}.{because}")


def _wait(task: Row) -> Reason:
    name, signal, until = task["wait_name"], task["wait_signal"], task["wait_until"]
    if signal is None:
        return Reason(ReasonCode.SLEEPING, f"Sleeps in step {name!r} until {_when(until, task['now'])}.")
    step = "" if name == signal else f", in step {name!r}"
    end = "without a time limit" if until is None else f"until {_when(until, task['now'])}"
    return Reason(
        ReasonCode.WAITING_SIGNAL,
        f"Waits for the signal {signal!r}{step}, {end}. Send it: lineshaft task signal {task['id']} "
        f"{shlex.quote(signal)}.",
    )


def _retry(task: Row) -> Reason:
    after = f" after {task['last_category']}" if task["last_category"] else ""
    return Reason(
        ReasonCode.WAITING_RETRY,
        f"Waits{after} until {_when(task['due_at'], task['now'])}; {task['attempts']} of "
        f"{task['max_attempts']} attempts are used. Retry it to start at once.",
    )


def _gate(task: Row) -> Reason:
    method = task["gate"]
    if method is None:
        return Reason(ReasonCode.WAITING_GATE, "Its output was just submitted and is being checked.")
    place = f"gate {task['gate_no'] + 1} of {task['gates']}, {method!r}, since {_iso(task['gate_since'])}"
    if method == HUMAN:
        return Reason(
            ReasonCode.WAITING_APPROVAL,
            f"Its output waits for a person at {place}. Approve or reject it: it is in the list of "
            "approvals.",
        )
    if task["gate_blocked_by"] is not None:
        return Reason(
            ReasonCode.GATE_BUDGET,
            f"Its output is at {place}. A run of this gate may cost {_usd(task['judge_max_cost_usd'])} "
            f"(judge_max_cost_usd), and {_gate_purse(task)} A validator looks again at "
            f"{_when(task['gate_due_at'], task['now'], 'a validator')}.",
        )
    if not task["gate_runs"]:
        how = "No validator has started: the gate needs a server that can run it."
    else:
        error = f" (last time: {_short(task['gate_error'])})" if task["gate_error"] else ""
        how = (
            f"Validators have started {task['gate_runs']} times{error}; without a verdict the gate runs "
            f"again at {_when(task['gate_due_at'], task['now'], 'a validator')}."
        )
    return Reason(ReasonCode.WAITING_GATE, f"Its output is at {place}. {how}")


def _gate_purse(task: Row) -> str:
    """The limit that had no money left for a gate, as it is now, and what to do."""
    total, ceiling = task["max_total_cost_usd"], task["budget_ceiling_usd"]
    purses = {
        "max_total_cost": (
            None if total is None else total - task["spent_so_far_usd"],
            "the task's max_total_cost_usd",
            "Raise it, or cancel the task.",
        ),
        "agent_budget": (
            task["agent_left_usd"],
            f"the budget of agent {task['paying_agent']}, which made the output",
            "Add to it.",
        ),
        "dag_budget": (
            None if ceiling is None else ceiling - task["spent_usd"] - task["reserved_usd"],
            f"the budget of DAG {task['dag_id']}",
            "Raise its ceiling.",
        ),
        "daily_budget": (
            task["left_today_usd"],
            "the daily budget",
            "Wait until midnight UTC, or raise it: lineshaft limits set --daily-budget USD.",
        ),
    }
    if task["gate_blocked_by"] not in purses:
        return "spending is stopped. Resume it: lineshaft resume."
    left, whose, remedy = purses[task["gate_blocked_by"]]
    if left is None or left >= task["judge_max_cost_usd"]:
        return "there is money for it by now."
    return f"{_usd(left)} is left of {whose}. {remedy}"


def _held(task: Row, status: Status) -> Reason:
    now, since = task["now"], task["started_at"] or task["claimed_at"]
    place = f" ({short_names([task['instance']])[0]})" if task["instance"] else ""
    agent = f"Agent {task['holder']}{place}"
    lease = (
        f"Last heartbeat {_seconds(now - task['heartbeat_at'])} ago; without another one the lease expires "
        f"at {_when(task['lease_until'], now, 'the reaper')}, and another agent takes the task."
    )
    if status is Status.CLAIMED:
        return Reason(
            ReasonCode.CLAIMED, f"{agent} claimed it at {_iso(since)} and has not started it yet. {lease}"
        )
    progress = "" if task["progress"] is None else f" Progress: {_cut(task['progress'])}."
    limit = since + timedelta(seconds=task["limit_sec"])
    return Reason(
        ReasonCode.RUNNING,
        f"{agent} has worked on it since {_iso(since)}, for {_seconds(now - since)}, try "
        f"{task['attempts'] + 1} of {task['max_attempts']}.{progress} {lease} The time limit of the attempt "
        f"is {task['limit_sec']:g} s, until {_iso(limit)}.",
    )


def _ended(task: Row, status: Status) -> Reason:
    at = _iso(task["ended_at"])
    cause = ": ".join(filter(None, (task["end_category"], task["end_reason"] and _short(task["end_reason"]))))
    if status is Status.COMPLETED:
        began, agent = task["started_at"], task["holder"]
        took = "" if began is None else f", {_seconds(task['ended_at'] - began)} after the attempt began"
        tries = f", try {task['attempts'] + 1} of {task['max_attempts']}" if task["claimed_at"] else ""
        cost = f", for {_usd(task['spent_in_all_usd'])}" if task["spent_in_all_usd"] else ""
        by = f"by agent {agent} " if agent else ""
        return Reason(ReasonCode.COMPLETED, f"Completed {by}at {at}{took}{tries}{cost}.")
    if status is Status.CANCELLED:
        return Reason(
            ReasonCode.CANCELLED, f"Cancelled at {at}: {cause or 'no reason given'}. Retry it to run it."
        )
    return Reason(
        ReasonCode.DEAD_LETTERED,
        f"Failed permanently at {at} after {task['attempts']} of {task['max_attempts']} tries: {cause}. It "
        "waits for a decision: retry it, modify and retry it, or cancel it.",
    )


def _guards(task: Row) -> Iterable[Reason]:
    for name, reason, actor in zip(task["paused"], task["paused_because"], task["paused_by"], strict=True):
        what = "Everything" if name == "*" else f"Type {name!r}"
        yield Reason(ReasonCode.PAUSED, f"{what} is paused{_paused_by(actor, reason)}. Resume it.")
    if task["breaker_state"] is not None and not task["probe_due"]:
        yield Reason(ReasonCode.BREAKER_OPEN, _breaker(task))
    if task["slowed_until"] is not None:
        because = f" ({task['slowed_because']})" if task["slowed_because"] else ""
        yield Reason(
            ReasonCode.SLOWDOWN,
            f"All claims are suspended until {_iso(task['slowed_until'])} after a rate limit{because}."
            " Delete the slowdown * to continue at once.",
        )
    if task["lock_refused"] and task["lock_holder"].startswith(OUTSIDE):
        yield Reason(
            ReasonCode.LOCK_HELD,
            f"Lock {task['lock_key']!r} is held by another program "
            f"({_short(task['lock_holder'].removeprefix(OUTSIDE))}) until that releases it.",
        )
    elif task["lock_refused"] and task["lock_readers"] is not None:
        yield Reason(ReasonCode.LOCK_HELD, _shared_lock(task))
    elif task["lock_refused"]:
        by = f" with agent {task['lock_agent']}" if task["lock_agent"] else ""
        yield Reason(
            ReasonCode.LOCK_HELD,
            f"Lock {task['lock_key']!r} is held by task {task['lock_holder']}{by} until that task ends, "
            f"or until {_iso(task['lock_expires_at'])} unless renewed. Delete it if the holder is gone.",
        )
    elif task["parked"] == "lock":
        yield Reason(
            ReasonCode.LOCK_HELD,
            f"Lock {task['lock_key']!r} was held and is free now: the promoter makes this task claimable at "
            "its next tick.",
        )


def _shared_lock(task: Row) -> str:
    key, readers = task["lock_key"], task["lock_readers"]
    if not task["lock_shared"]:
        return f"Lock {key!r} is shared by tasks {_listed(readers)}; this task gets it alone after them."
    writer = f"task {task['lock_writer']}" if task["lock_writer"] else "a task"
    return (
        f"Lock {key!r} is shared by tasks {_listed(readers)}, and {writer} waits to have it alone: later "
        "readers wait for that."
    )


def _quotas(task: Row) -> Iterable[Reason]:
    if task["full_quotas"] is not None:
        yield from _full_quotas(task["full_quotas"])
    elif task["parked"] == "quota":
        yield Reason(
            ReasonCode.QUOTA,
            "A quota of its keys had no room and has some now: the quota keeper makes this task claimable at "
            "its next tick.",
        )


class _FullQuota(Struct, frozen=True):
    quota: str
    key: str
    limit: float
    used: float
    holders: list[str]
    free_at: datetime | None

    @property
    def reason(self) -> Reason:
        facts = {name: getattr(self, name) for name in ("quota", "key", "limit", "used", "holders")}
        what = f"Quota {self.quota!r} has no room for {self.key!r}: {self.used:g} of {self.limit:g}"
        if self.free_at is not None:
            detail = f"{what} are used. There is room again at {_iso(self.free_at)}."
            return Reason(ReasonCode.QUOTA, detail, **facts, free_at=self.free_at)
        held = f", by {_listed(self.holders)}" if self.holders else ""
        return Reason(ReasonCode.QUOTA, f"{what} are held{held}. Wait for one of them, or raise it.", **facts)


def _full_quotas(stored: bytes) -> Iterable[Reason]:
    """From full_quotas_1."""
    return [full.reason for full in msgspec.json.decode(stored, type=list[_FullQuota])]


def _paused_by(actor: str | None, reason: str | None) -> str:
    if reason is None:
        return " manually" if actor is None else f" by {actor}"
    return f": {reason}" if actor is None else f" by {actor}: {reason}"


def _breaker(task: Row) -> str:
    opened = (
        f"The breaker of type {task['type']!r} is {task['breaker_state']} since {_iso(task['opened_at'])}"
    )
    if task["forced"]:
        return f"{opened}, opened manually. Reset it."
    if task["probe_task_id"]:
        return f"{opened}; task {task['probe_task_id']} is its probe and decides whether it closes."
    failures = f"{opened}, after {task['failures']} failures."
    if task["probe_at"] is None:
        return f"{failures} Reset it."
    return f"{failures} The first claim after {_iso(task['probe_at'])} gets one task as a probe; or reset it."


def _affords(money: Decimal, task: Row) -> bool:
    """Whether this much is enough: the database says how much a claim needs (lineshaft.needed_1)."""
    return bool(money >= task["needed_usd"])


def _price(task: Row) -> str:
    if task["open_ended"] and not task["cost_usd"]:
        return "has no cost limit, so it needs some money"
    return f"may cost {_usd(task['cost_usd'])}"


def _daily_budget(task: Row) -> Iterable[Reason]:
    left = task["left_today_usd"]
    if left is not None and not _affords(left, task):
        yield Reason(
            ReasonCode.DAILY_BUDGET,
            f"{_usd(left)} of the daily budget is neither spent nor reserved, and the task "
            f"{_price(task)}. Wait until midnight UTC, or raise it: lineshaft limits set --daily-budget USD.",
        )


def _dag_budget(task: Row) -> Iterable[Reason]:
    ceiling = task["budget_ceiling_usd"]
    if ceiling is None:
        return
    left = ceiling - task["spent_usd"] - task["reserved_usd"]
    if not _affords(left, task):
        yield Reason(
            ReasonCode.DAG_BUDGET,
            f"DAG {task['dag_id']} has {_usd(left)} left of {_usd(ceiling)} ({_usd(task['spent_usd'])} "
            f"spent, {_usd(task['reserved_usd'])} reserved) and the task {_price(task)}. Wait for "
            "reservations to be settled, raise the ceiling, or cancel it.",
        )
    elif task["parked"] == "dag_budget":
        yield Reason(
            ReasonCode.DAG_BUDGET,
            f"DAG {task['dag_id']} was over its budget and has {_usd(left)} now: the promoter makes this "
            "task claimable at its next tick.",
        )


class _Agent:
    """One instance of an agent and the task, with the tests of claim_tasks."""

    def __init__(self, row: Row, task: Row, unusable: dict[str, datetime | None]) -> None:
        self.row = row
        self.id: str = row["id"]
        self.active = row["status"] == "active"
        self.missing = sorted(set(task["required_capabilities"]) - set(row["capabilities"]))
        self.wrong_type = row["types"] is not None and task["type"] not in row["types"]
        wanted, own = task["models"], row["models_available"]
        # Without preferences the agent uses its own first model.
        candidates = own[:1] if not wanted else [m for m in wanted if not own or m in own]
        self.no_model = bool(wanted) and not candidates
        self.suspended = [m for m in candidates if m in unusable]
        self.models_ok = (not wanted and not own) or len(self.suspended) < len(candidates)
        # A claim chooses the model first, and then looks at its quotas.
        chosen = next((model for model in candidates if model not in unusable), None)
        full = {key: row["full_keys"].get(key) for key in (f"agent:{self.id}", f"model:{chosen}")}
        self.full_quotas: dict[str, bytes] = {
            key: quotas for key, quotas in full.items() if quotas is not None
        }
        self.money: Decimal | None = row["money"]
        self.affords = self.money is None or _affords(self.money, task)
        self.free = row["held"] < row["max_concurrent_tasks"]
        self.slowed_until: datetime | None = row["slowed_until"]
        #: It has accounts, and none is open.
        self.closed: bool = row["is_closed"]

    @property
    def ready(self) -> bool:
        """No guard keeps it from claiming the task."""
        return self.models_ok and self.affords and self.slowed_until is None and not self.closed

    @property
    def capable(self) -> bool:
        return not (self.wrong_type or self.missing or self.no_model)


def _agents(task: Row, unusable: dict[str, datetime | None], rows: Sequence[Row]) -> Iterable[Reason]:
    agents = [_Agent(row, task, unusable) for row in rows]
    capable = [agent for agent in agents if agent.capable and agent.active]
    if not capable and HUMAN in task["required_capabilities"]:
        yield Reason(
            ReasonCode.WAITING_APPROVAL,
            f"Waits for a person: it needs the capability {HUMAN!r}. Approve or reject it: it is in the list "
            "of approvals.",
        )
        return
    if not capable:
        yield Reason(ReasonCode.NO_CAPABLE_AGENT, _no_capable_agent(task, agents))
        return
    if any(agent.ready and agent.free and not agent.full_quotas for agent in capable):
        return
    for quotas in {key: quotas for agent in capable for key, quotas in agent.full_quotas.items()}.values():
        yield from _full_quotas(quotas)
    if closed := [agent for agent in capable if agent.closed]:
        yield _account_closed(closed)
    yield from _slowed_or_broken(capable, unusable)
    if poor := [agent for agent in capable if not agent.affords]:
        left = _listed(f"{agent.id} has {_usd(agent.money or Decimal(0))}" for agent in poor)
        yield Reason(
            ReasonCode.NO_AFFORDABLE_AGENT,
            f"The task {_price(task)}; {left} left. Add to a budget or register an agent.",
        )
    if full := [agent for agent in capable if not agent.free]:
        turn = ""
        if task["fair_key"] is not None:
            turn = f" Its turn depends on its key {task['fair_key']!r}: {task['fair_held']} run."
        yield Reason(
            ReasonCode.AGENTS_FULL,
            f"Slots are taken: {_slots(full)}. Wait, raise a limit, or add agents.{turn}",
        )


def _slowed_or_broken(capable: Sequence[_Agent], unusable: dict[str, datetime | None]) -> Iterable[Reason]:
    if waiting := sorted({(a.slowed_until, a.id) for a in capable if a.slowed_until is not None}):
        names = _listed(f"{name} until {_iso(until)}" for until, name in waiting)
        yield Reason(
            ReasonCode.SLOWDOWN,
            f"Agents are slowed down after a rate limit: {names}. Wait, or delete the slowdown agent:ID.",
        )
    suspended = {m for agent in capable if not agent.models_ok for m in agent.suspended}
    if slowed := sorted((until, m) for m in suspended if (until := unusable[m]) is not None):
        models = _listed(f"{model} until {_iso(until)}" for until, model in slowed)
        yield Reason(
            ReasonCode.SLOWDOWN,
            f"Models are slowed down after a rate limit: {models}. Wait, or delete the slowdown.",
        )
    if broken := sorted(m for m in suspended if unusable[m] is None):
        keys = _listed(f"model:{model}" for model in broken)
        yield Reason(ReasonCode.BREAKER_OPEN, f"The breaker of {keys} is not closed. Reset it, or wait.")


def _account_closed(agents: Sequence[_Agent]) -> Reason:
    names = _listed(f"{agent.id} ({', '.join(agent.row['accounts'])})" for agent in agents)
    until = min((at for agent in agents if (at := agent.row["closed_until"]) is not None), default=None)
    end = "" if until is None else f" The first opens at {_iso(until)}."
    return Reason(
        ReasonCode.ACCOUNT_CLOSED,
        f"All accounts are closed of {names}.{end} Wait, or open one: lineshaft slowdowns end account:NAME, "
        "or lineshaft breakers reset account:NAME.",
        until,
    )


def _slots(instances: Sequence[_Agent]) -> str:
    """The sums of each agent."""
    held: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    for each in instances:
        held[each.id] += each.row["held"]
        slots[each.id] += each.row["max_concurrent_tasks"]
    return _listed(f"{name} {held[name]} of {slots[name]}" for name in slots)


def _no_capable_agent(task: Row, agents: Sequence[_Agent]) -> str:
    wants = [f"type {task['type']!r}"]
    if task["required_capabilities"]:
        wants.append(
            f"capabilities {_listed(task['required_capabilities'], len(task['required_capabilities']))}"
        )
    if task["models"]:
        wants.append(f"one of the models {_listed(task['models'], len(task['models']))}")
    needs = f"It needs an active agent for {', '.join(wants)}."
    if idle := [agent for agent in agents if agent.capable]:
        names = _listed(f"{agent.id} ({agent.row['status']})" for agent in idle)
        return f"{needs} Capable, but not active: {names}."
    active = [agent for agent in agents if agent.active]
    if not active:
        return f"{needs} No agent is active: register one."
    # The closest matches are the most informative.
    closest = sorted(active, key=lambda a: (a.wrong_type, len(a.missing) + a.no_model, a.id))
    lacking = list(dict.fromkeys(f"{agent.id} {_lacks(agent)}" for agent in closest))
    return f"{needs} Active: {'; '.join(lacking[:_NAMED])}."


def _lacks(agent: _Agent) -> str:
    if agent.wrong_type:
        return f"takes only {_listed(agent.row['types']) or 'nothing'}"
    lacks = [*agent.missing, *(["such a model"] if agent.no_model else [])]
    return f"lacks {', '.join(lacks)}"


def _listed(items: Iterable[str], most: int = _NAMED) -> str:
    # An agent has many instances, of which all that is named may be the same.
    found = list(dict.fromkeys(items))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _cut(text: str) -> str:
    return text if len(text) < _PROGRESS else f"{text[:_PROGRESS]}…"


def _seconds(length: timedelta) -> str:
    seconds = max(length.total_seconds(), 0)
    return f"{seconds:.0f} s" if seconds >= _WHOLE_SECONDS else f"{seconds:.1f} s"


def _short(error: str) -> str:
    return " ".join(error.split())[:_ERROR].rstrip(".")


def _usd(amount: Decimal) -> str:
    return f"{amount.normalize():f} USD"


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _when(at: datetime, now: datetime, who: str = "the promoter") -> str:
    if at <= now:
        return f"{_iso(at)}, which is past: {who} continues at its next tick"
    return _iso(at)
