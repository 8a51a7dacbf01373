"""The lifecycle of tasks as a machine for Hypothesis, with a model of it that fits on a page.

Several processes of two agents submit, claim, finish, fail, release, spawn, cancel, retry and rerun; tasks
sleep and wait for signals, which come before, meanwhile or never; processes fall silent, are superseded,
restarted, or reported as dead by a sibling. After every step the database must say what the model says, and
all counters and locks must add up. The guards are on: the circuit breaker of the one type there is must be
where `model/breaker.py` says, a slow-down holds everybody back, and quotas of keys, of the type and of an
agent are set, changed and deleted meanwhile. Gates on outputs are in
`gated_machine.py`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import ClassVar, NamedTuple

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from lineshaft.checks.registry import Checks
from lineshaft.clock import MovableClock
from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.rules import Rules
from lineshaft.errors import DependentsRunningError, ForbiddenError, SupersededError
from lineshaft.model import breaker
from lineshaft.model.admission import LockKey
from lineshaft.model.breaker import Admission, Breaker, BreakerConfig, BreakerPolicy
from lineshaft.model.reviews import ResolutionRequest
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec
from lineshaft.operations.quotas import SetQuota
from lineshaft.types import NewAgent
from lineshaft.types.waits import NewSignal, NewSuspension
from lineshaft.types.work import ClaimedTask, ClaimRef, Completion, Failure
from tests.conftest import TEMPLATE, NewDatabase
from tests.invariants import check_invariants
from tests.world import release_claims, spawn_children

MAX_ATTEMPTS = 2
MAX_WAITS = 10
#: Longer than any history.
A_LONG_TIME = 10_000_000.0
CONFIG = BreakerConfig(failure_threshold=3, cooldown_sec=100, half_open_after_sec=3)
#: Much more than is ever spent, but claims have to look.
RULES = Rules(BreakerPolicy(CONFIG), {"daily_budget_usd": Decimal(1_000_000)})
LIVE = {"PENDING", "READY", "RUNNING", "VALIDATING", "RETRYING"}
LOCKS: list[dict[str, bool]] = [
    *({}, {}, {}, {"a": False}, {"a": True}, {"b": True}),
    *({"a": False, "b": False}, {"a": True, "b": True}, {"a": True, "b": False}),
]
#: The agents of the processes: two of the same one, and another.
AGENTS = ("a1", "a1", "a2")


def decided(resolution: str) -> ResolutionRequest:
    return ResolutionRequest(resolution=resolution, reviewer="ann")


class Process(NamedTuple):
    """An instance of an agent."""

    agent: str
    name: str
    incarnation: int

    @property
    def key(self) -> str:
        """As breakers know it."""
        return f"{self.agent}#{self.incarnation}"


@dataclass
class Wait:
    step: str
    for_signal: bool
    has_end: bool
    #: The claim that last began it.
    epoch: int = 0
    is_over: bool = False


@dataclass
class Task:
    """What the model knows about a task."""

    status: str
    #: Open dependencies that need success, and children that need any end.
    needs: set[str] = field(default_factory=set)
    awaits: set[str] = field(default_factory=set)
    #: All dependencies, and all children that it has waited for, whether they are open or not.
    upstream: set[str] = field(default_factory=set)
    children: set[str] = field(default_factory=set)
    parent: str | None = None
    #: Its document locks: whether each is shared.
    locks: dict[str, bool] = field(default_factory=dict)
    #: Its only quota key.
    quota_key: str | None = None
    attempts: int = 0
    waits: int = 0
    epoch: int = 0
    agent: Process | None = None
    #: The gates of its output; at which gate the output is, and what it waits for there.
    gates: tuple[str, ...] = ()
    gate_no: int = 0
    waits_for: str | None = None
    #: Whether the recorded output is one that a check accepts.
    good: bool = True
    #: How often a validator has begun with the gate, and when the next one may.
    runs: int = 0
    due: datetime | None = None
    #: The wait that it has begun.
    wait: "Wait | None" = None
    #: It is due at the end of the wait, which no history reaches by itself.
    sleeps: bool = False
    key: str | None = None
    #: Signals that it hasn't received, and the waits that it has ended.
    signals: int = 0
    waited: int = 0

    @property
    def is_plain_work(self) -> bool:
        return self.status == "RUNNING" and not self.gates

    def settle(self) -> None:
        if self.status == "PENDING" and not self.needs and not self.awaits and not self.sleeps:
            self.status = "READY"


class Lifecycle(RuleBasedStateMachine):
    #: Set by the test: Hypothesis makes the instances.
    new_database: ClassVar[NewDatabase]
    #: Those of a new task.
    gates: st.SearchStrategy[tuple[str, ...]] = st.just(())

    def checks(self) -> Checks:
        return Checks()

    @initialize()
    def start(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.clock = MovableClock()
        self.breaker = Breaker()
        self.slowed_until = self.clock.now()
        self.database = type(self).new_database(TEMPLATE)
        self.dsn = self.database.__enter__()
        self.runner = asyncio.Runner()
        self.engine = Engine(self.dsn, clock=self.clock, max_connections=2, rules=RULES, checks=self.checks())
        self.runner.run(self.engine.__aenter__())
        self.look = psycopg.connect(self.dsn, autocommit=True)
        self.names = count(1)
        #: Limits by what they match, and whether all keys share one.
        self.quotas: dict[tuple[str, bool], int] = {}
        #: Those that live, and those that were superseded or taken for dead.
        self.processes = [self.registered(agent, f"p{next(self.names)}") for agent in AGENTS]
        self.former: list[Process] = []

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.look.close()
            self.runner.run(self.engine.database.close())
            self.runner.close()
            self.database.__exit__(None, None, None)

    def registered(self, agent: str, name: str, gone: tuple[str, ...] = ()) -> Process:
        new = NewAgent(id=agent, instance=name, host="h", gone=gone, max_concurrent_tasks=2)
        return Process(agent, name, self.runner.run(self.engine.fleet.register(new)).incarnation)

    def some(self, data: st.DataObject, *statuses: str) -> str:
        return data.draw(st.sampled_from([name for name, t in self.tasks.items() if t.status in statuses]))

    def have(self, *statuses: str) -> bool:
        return any(task.status in statuses for task in self.tasks.values())

    def new_task(
        self,
        upstream: set[str],
        locks: dict[str, bool] | None = None,
        gates: tuple[str, ...] = (),
        quota_key: str | None = None,
    ) -> NewTask:
        listed = tuple(Gate(method, "^good$" if method == "regex" else None) for method in gates)
        return NewTask(
            "t",
            depends_on=sorted(upstream),
            lock_keys=[LockKey(key, shared) for key, shared in (locks or {}).items()],
            quota_keys=() if quota_key is None else (quota_key,),
            output=OutputContract(validation=listed) if listed else None,
            max_attempts=MAX_ATTEMPTS,
            # Before the next promotion: a claim that comes short would promote what is due.
            retry=RetrySpec(strategy="fixed", initial_delay_sec=0.5),
        )

    def add(
        self,
        name: str,
        upstream: set[str],
        parent: str | None = None,
        locks: dict[str, bool] | None = None,
    ) -> None:
        open_ones = {u for u in upstream if self.tasks[u].status != "COMPLETED"}
        self.tasks[name] = Task("PENDING", open_ones, upstream=upstream, parent=parent, locks=locks or {})
        self.tasks[name].settle()

    def ended(self, name: str) -> None:
        """The dependents of this task move on."""
        for task in self.tasks.values():
            task.awaits.discard(name)
            if self.tasks[name].status == "COMPLETED":
                task.needs.discard(name)
            task.settle()

    @rule(
        data=st.data(),
        locks=st.sampled_from(LOCKS),
        quota_key=st.sampled_from([None, "k:a", "k:a", "k:b"]),
        keyed=st.booleans(),
    )
    def submit(self, data: st.DataObject, locks: dict[str, bool], quota_key: str | None, keyed: bool) -> None:
        possible = [name for name, task in self.tasks.items() if task.status != "CANCELLED"]
        upstream = data.draw(st.sets(st.sampled_from(possible), max_size=3)) if possible else set()
        gates = data.draw(self.gates)
        key = f"k{next(self.names)}" if keyed else None
        new = self.new_task(upstream, locks, gates, quota_key).with_options(idempotency_key=key)
        (found,) = self.runner.run(self.engine.submission.submit([new]))
        self.add(found.id, upstream, locks=locks)
        self.tasks[found.id].gates, self.tasks[found.id].key = gates, key
        self.tasks[found.id].quota_key = quota_key

    @precondition(lambda self: any(task.key and task.status in LIVE for task in self.tasks.values()))
    @rule(data=st.data(), locks=st.sampled_from(LOCKS))
    def submit_again(self, data: st.DataObject, locks: dict[str, bool]) -> None:
        """With the key of a task, which is replaced if it waits, and others don't wait for it."""
        keyed = [name for name, task in self.tasks.items() if task.key and task.status in LIVE]
        name = data.draw(st.sampled_from(keyed))
        task, gates = self.tasks[name], data.draw(self.gates)
        new = self.new_task(task.upstream, locks, gates, task.quota_key)
        new = new.with_options(idempotency_key=task.key, on_conflict="replace_waiting")
        call = self.engine.submission.submit([new])
        waits = task.status in {"PENDING", "READY", "RETRYING"}
        others = [t for t in self.tasks.values() if t.status in LIVE]
        if waits and any(name in t.needs | t.awaits or t.parent == name for t in others):
            with pytest.raises(ForbiddenError):
                self.runner.run(call)
            return
        (found,) = self.runner.run(call)
        assert (found.id, found.replaced, found.duplicate) == (name, waits, not waits)
        if waits:
            self.let_go(name, "PENDING")
            task.locks, task.gates, task.attempts, task.waits = locks, gates, 0, 0
            task.wait, task.signals, task.waited = None, 0, 0
            task.settle()

    @rule(n=st.sampled_from(range(len(AGENTS))), limit=st.integers(1, 3))
    def claim(self, n: int, limit: int) -> None:
        agent = self.processes[n]
        claimed = self.runner.run(
            self.engine.claims.claim(agent.agent, agent.incarnation, limit=limit, start=True)
        ).tasks
        self.claimed(agent, claimed, limit)

    def claimed(self, agent: Process, claimed: Sequence[ClaimedTask], limit: int) -> None:
        room = min(limit, 2 - sum(task.agent == agent for task in self.tasks.values()))
        verdict = breaker.admission(self.breaker, CONFIG, self.clock.now())
        if self.clock.now() < self.slowed_until or verdict is Admission.BLOCK:
            room = 0
        elif verdict is Admission.PROBE:
            room = min(room, 1)
        assert len(claimed) <= room
        if claimed and verdict is Admission.PROBE:
            self.breaker = breaker.hand_out_probe(
                self.breaker, CONFIG, task_id=claimed[0].id, now=self.clock.now()
            ).breaker
        for found in claimed:
            task = self.tasks[found.id]
            assert task.status == "READY"
            assert not self.lacks_a_lock(task, writers=set())
            assert not self.lacks_a_quota(task, agent)
            task.status, task.agent, task.epoch = "RUNNING", agent, task.epoch + 1
            assert found.epoch == task.epoch
        if len(claimed) < room:
            # Nothing that could run is left.
            parked = self.look.execute("SELECT id, lock_key FROM lineshaft.task_live WHERE parked = 'lock'")
            writers = {key for name, key in parked.fetchall() if not self.tasks[name].locks[key]}
            assert all(
                self.lacks_a_lock(task, writers) or self.lacks_a_quota(task, agent)
                for task in self.tasks.values()
                if task.status == "READY"
            )

    def lacks_a_lock(self, task: Task, writers: set[str]) -> bool:
        """`writers`: locks for which others wait that want them alone."""
        held = [other.locks for other in self.tasks.values() if other.agent is not None]
        return any(
            any(key in locks and not (shared and locks[key]) for locks in held)
            or (shared and key in writers and any(key in locks for locks in held))
            for key, shared in task.locks.items()
        )

    def lacks_a_quota(self, task: Task, agent: Process) -> bool:
        """Whether a quota of the task, its type or the agent has no room."""
        held = [other for other in self.tasks.values() if other.agent is not None]
        counts = {
            ("type:t", False): len(held),
            ("agent:a1", False): sum(t.agent.agent == "a1" for t in held if t.agent is not None),
            ("k:*", False): sum(t.quota_key == task.quota_key for t in held),
            ("k:*", True): sum(t.quota_key is not None for t in held),
        }
        return any(
            counts[quota] >= most
            for quota, most in self.quotas.items()
            if (quota[0] != "k:*" or task.quota_key is not None)
            and (quota[0] != "agent:a1" or agent.agent == "a1")
        )

    @rule(
        match=st.sampled_from(["k:*", "k:*", "type:t", "agent:a1"]),
        shares=st.booleans(),
        most=st.sampled_from([None, 0, 1, 1, 2, 3]),
    )
    def set_a_quota(self, match: str, shares: bool, most: int | None) -> None:
        """`most`: None deletes it."""
        shares = shares and match == "k:*"
        name = f"{match[0]}-{shares}"
        if most is None:
            if self.quotas.pop((match, shares), None) is not None:
                self.runner.run(self.engine.quotas.delete(name))
            return
        quota = SetQuota(name=name, match=match, each=not shares, max_running=most)
        self.runner.run(self.engine.quotas.set(quota))
        self.quotas[match, shares] = most

    @rule()
    def the_keeper_looks(self) -> None:
        self.runner.run(QuotaKeeper(self.engine.quotas).run_once())

    def let_go(self, name: str, status: str) -> Task:
        task = self.tasks[name]
        task.status, task.agent, task.sleeps = status, None, False
        return task

    def probe_told_nothing(self, name: str) -> None:
        self.breaker = breaker.on_probe_gone(
            self.breaker, key="t", task_id=name, now=self.clock.now(), failed=False
        ).breaker

    def attempt_failed(self, name: str, *, lost: Process | None = None) -> None:
        """`lost`: together with this process."""
        task = self.tasks[name]
        task.attempts, task.waits = task.attempts + 1, 0
        self.let_go(name, "DEAD_LETTERED" if task.attempts >= MAX_ATTEMPTS else "RETRYING")
        self.breaker = breaker.on_failure(
            self.breaker,
            CONFIG,
            key="t",
            task_id=name,
            now=self.clock.now(),
            counts=True,
            lost=None if lost is None else lost.key,
        ).breaker

    @precondition(lambda self: self.have("RUNNING"))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        name = self.some(data, "RUNNING")
        done = Completion(ClaimRef(name, self.tasks[name].epoch), b"1")
        for _ in range(2):  # the answer may have been lost on the way
            (moved,) = self.runner.run(self.engine.work.complete([done]))
            assert moved.unwrap() == "COMPLETED"
        self.completed(name)

    @precondition(lambda self: any(task.is_plain_work for task in self.tasks.values()))
    @rule(data=st.data())
    def complete_and_claim(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, task in self.tasks.items() if task.is_plain_work]))
        agent = self.tasks[name].agent
        assert agent is not None
        done = Completion(ClaimRef(name, self.tasks[name].epoch), b"1")
        moved, claim = self.runner.run(self.engine.work.complete_and_claim(done))
        assert moved.unwrap() == "COMPLETED"
        self.completed(name)
        self.claimed(agent, claim.tasks, 1)

    def completed(self, name: str) -> None:
        self.let_go(name, "COMPLETED")
        self.breaker = breaker.on_success(self.breaker, task_id=name).breaker
        self.ended(name)

    @precondition(lambda self: self.have("RUNNING"))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = self.some(data, "RUNNING")
        task = self.tasks[name]
        (moved,) = self.runner.run(self.engine.work.fail([Failure(ClaimRef(name, task.epoch), "it broke")]))
        self.attempt_failed(name)
        assert moved.unwrap() == task.status
        if task.status == "DEAD_LETTERED":
            self.ended(name)

    @precondition(lambda self: self.have("RUNNING"))
    @rule(data=st.data())
    def meet_a_rate_limit(self, data: st.DataObject) -> None:
        """It uses no attempt, and everybody slows down for half of the second that it waits."""
        name = self.some(data, "RUNNING")
        task = self.tasks[name]
        limited = Failure(ClaimRef(name, task.epoch), "429", retry_after_sec=1)
        (moved,) = self.runner.run(self.engine.work.fail([limited]))
        assert task.waits < MAX_WAITS, "more than one history has"
        task.waits += 1
        self.let_go(name, "RETRYING")
        assert moved.unwrap() == "RETRYING"
        self.slowed_until = self.clock.now() + timedelta(seconds=0.5)
        self.probe_told_nothing(name)

    @rule()
    def wait_for_a_probe(self) -> None:
        self.clock.advance(CONFIG.half_open_after_sec + 0.001)
        self.promoted()

    @rule(forced=st.booleans())
    def somebody_sees_to_the_breaker(self, forced: bool) -> None:
        if forced:
            self.runner.run(self.engine.breakers.open("t"))
            self.breaker = breaker.force_open(self.breaker, key="t", now=self.clock.now()).breaker
        else:
            self.runner.run(self.engine.breakers.reset("t"))
            self.breaker = breaker.reset(self.breaker).breaker

    @precondition(lambda self: self.have("RUNNING"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.some(data, "RUNNING")
        self.runner.run(release_claims(self.engine, [ClaimRef(name, self.tasks[name].epoch)]))
        self.let_go(name, "READY")
        self.probe_told_nothing(name)

    @precondition(lambda self: self.have("RUNNING"))
    @rule(data=st.data(), n=st.integers(1, 2), wait=st.booleans())
    def spawn(self, data: st.DataObject, n: int, wait: bool) -> None:
        parent = self.some(data, "RUNNING")
        claim = ClaimRef(parent, self.tasks[parent].epoch)
        new = [self.new_task(set()) for _ in range(n)]
        children = self.runner.run(spawn_children(self.engine, claim, new, wait=wait))
        for child in children:
            self.add(child.id, set(), parent=parent)
        if wait:
            waiting = self.let_go(parent, "PENDING")
            waiting.awaits = {child.id for child in children}
            waiting.children |= waiting.awaits
            self.probe_told_nothing(parent)

    @precondition(lambda self: self.have("RUNNING"))
    @rule(data=st.data(), for_signal=st.booleans(), has_end=st.booleans())
    def suspend(self, data: st.DataObject, for_signal: bool, has_end: bool) -> None:
        name = self.some(data, "RUNNING")
        task = self.tasks[name]
        wait = task.wait or Wait(f"wait {task.waited}", for_signal, has_end or not for_signal)
        new = NewSuspension(
            ClaimRef(name, task.epoch),
            wait.step,
            "go" if wait.for_signal else None,
            A_LONG_TIME if wait.has_end else None,
        )
        received = wait.for_signal and task.signals > 0
        for _ in range(2):  # the answer may have been lost on the way
            end = self.runner.run(self.engine.work.suspend([new]))[0].unwrap()
            assert (end is not None) == (received or wait.is_over)
            assert (end is not None and end.signal is not None) == received
        if received or wait.is_over:
            task.wait, task.waited, task.signals = None, task.waited + 1, task.signals - received
            return
        task.wait, wait.epoch = wait, task.epoch
        self.let_go(name, "PENDING")
        task.sleeps = True
        self.probe_told_nothing(name)

    @precondition(lambda self: self.have(*LIVE))
    @rule(data=st.data())
    def send_a_signal(self, data: st.DataObject) -> None:
        name = self.some(data, *LIVE)
        task = self.tasks[name]
        self.runner.run(self.engine.waits.signal(name, NewSignal("go")))
        task.signals += 1
        if task.sleeps and task.wait is not None and task.wait.for_signal:
            task.sleeps = False
            task.settle()

    @precondition(lambda self: any(task.sleeps and task.wait.has_end for task in self.tasks.values()))
    @rule(data=st.data())
    def a_wait_is_over(self, data: st.DataObject) -> None:
        """Its end comes: everything else has so much time only where a test wants it."""
        sleeping = [
            name for name, task in self.tasks.items() if task.sleeps and task.wait and task.wait.has_end
        ]
        name = data.draw(st.sampled_from(sleeping))
        task = self.tasks[name]
        now = self.clock.now()
        self.look.execute("UPDATE lineshaft.wait SET until = %s WHERE task_id = %s", [now, name])
        self.look.execute("UPDATE lineshaft.task_live SET due_at = %s WHERE id = %s", [now, name])
        assert task.wait is not None
        task.sleeps, task.wait.is_over = False, True
        self.promote()
        task.settle()

    @precondition(lambda self: self.have(*LIVE))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        first = self.some(data, *LIVE)
        going, todo = {first}, [first]
        while todo:
            name = todo.pop()
            # It stops at what has ended: that one's dependents wait for it, whatever became of the upstream.
            below = {
                n
                for n, t in self.tasks.items()
                if t.status in LIVE and (name in t.needs or t.parent == name) and n not in going
            }
            going |= below
            todo += below
        cancelled = self.runner.run(self.engine.cancel.cancel(first, "no"))
        assert set(cancelled) == going
        for name in going:
            self.let_go(name, "CANCELLED")
            self.probe_told_nothing(name)
        for name in going:
            self.ended(name)

    @precondition(lambda self: self.have("DEAD_LETTERED", "CANCELLED", "RETRYING"))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        name = self.some(data, "DEAD_LETTERED", "CANCELLED", "RETRYING")
        task = self.tasks[name]
        self.runner.run(self.engine.revive.retry(name))
        if task.status == "RETRYING":
            task.status = "READY"
        else:
            self.revived(name)

    def revived(self, *names: str) -> None:
        """They wait for what hasn't completed, also if it had completed once."""
        for name in names:
            self.tasks[name].status, self.tasks[name].attempts, self.tasks[name].waits = "PENDING", 0, 0
        for name in names:
            task = self.tasks[name]
            # It begins again.
            task.wait = None
            task.needs = {other for other in task.upstream if self.tasks[other].status != "COMPLETED"}
            task.awaits = {other for other in task.children if self.tasks[other].status in LIVE}
        for name in names:
            self.tasks[name].settle()

    @precondition(lambda self: self.have("COMPLETED"))
    @rule(data=st.data(), downstream=st.booleans())
    def rerun(self, data: st.DataObject, downstream: bool) -> None:
        first = self.some(data, "COMPLETED")
        members, todo = {first}, [first]
        while todo:
            name = todo.pop()
            below = {
                n
                for n, t in self.tasks.items()
                if name in t.upstream | t.children and n not in members and (downstream or t.status in LIVE)
            }
            members |= below
            todo += below if downstream else ()
        waiting = {name for name in members if self.tasks[name].status in LIVE}
        running = {name for name in waiting if self.has_begun(name, members)}
        call = self.engine.rerun.rerun(first, downstream=downstream)
        if running:
            with pytest.raises(DependentsRunningError):
                self.runner.run(call)
            return
        self.runner.run(call)
        again = members - waiting
        self.revived(*again)
        for name in again:
            # With its steps.
            self.tasks[name].signals, self.tasks[name].waited = 0, 0
        for name in waiting:
            task = self.tasks[name]
            if task.status == "RETRYING":
                task.signals, task.waited, task.wait = 0, 0, None
            task.needs |= task.upstream & again
            task.awaits |= task.children & again
            if task.needs or task.awaits:
                task.status = "PENDING"

    def has_begun(self, name: str, members: set[str]) -> bool:
        task = self.tasks[name]
        waits = task.awaits or (task.wait is not None and task.wait.epoch == task.epoch)
        return task.status in {"RUNNING", "VALIDATING"} or bool(
            task.status == "PENDING" and waits and task.upstream & members
        )

    @precondition(lambda self: self.have("DEAD_LETTERED"))
    @rule(data=st.data(), resolution=st.sampled_from(["cancel", "delete"]))
    def give_up(self, data: st.DataObject, resolution: str) -> None:
        first = self.some(data, "DEAD_LETTERED")
        goes = {*LIVE, "DEAD_LETTERED"}
        seen, todo = {first}, [first]
        while todo:
            name = todo.pop()
            drags = self.tasks[name].status in goes
            below = {
                n
                for n, t in self.tasks.items()
                if n not in seen and (t.parent == name or (drags and name in t.needs))
            }
            seen |= below
            todo += below
        going = {name for name in seen if self.tasks[name].status in goes}
        letter = self.runner.run(self.engine.dead_letters.resolve(first, decided(resolution)))
        assert letter.hidden == (resolution == "delete")
        for name in going:
            self.let_go(name, "CANCELLED")
            self.probe_told_nothing(name)
        for name in going:
            self.ended(name)

    @precondition(lambda self: self.have("DEAD_LETTERED"))
    @rule(data=st.data())
    def escalate_and_retry(self, data: st.DataObject) -> None:
        name = self.some(data, "DEAD_LETTERED")
        reviewed = self.runner.run(self.engine.dead_letters.get(name)).reviewed
        if not reviewed:
            self.runner.run(self.engine.dead_letters.resolve(name, decided("escalate")))
        self.runner.run(self.engine.dead_letters.resolve(name, decided("retry")))
        self.revived(name)

    @rule()
    def promote(self) -> None:
        self.clock.advance(1)
        self.promoted()

    def promoted(self) -> None:
        self.runner.run(self.engine.maintenance.promote_due(100))
        for task in self.tasks.values():
            if task.status == "RETRYING":
                task.status = "READY"

    @precondition(lambda self: self.have("RUNNING"))
    @rule()
    def everybody_dies(self) -> None:
        """All agents fall silent; the reaper takes everything back."""
        self.clock.advance(91)
        # Retries that became due in the meantime: a claim would promote them too, but only if it came short.
        self.promoted()
        self.runner.run(self.engine.maintenance.reap(100))
        self.lost(*self.processes)

    def lost(self, *processes: Process) -> None:
        """What they held fails."""
        dead = []
        for name, task in self.tasks.items():
            if task.agent in processes:
                self.attempt_failed(name, lost=task.agent)
                dead += [name] if task.status == "DEAD_LETTERED" else []
        for name in dead:
            self.ended(name)

    @rule(n=st.sampled_from([0, 1]), how=st.sampled_from(["superseded", "gone", "reported"]))
    def a_process_is_replaced(self, n: int, how: str) -> None:
        """By one of the same name, by one that knows it is dead, or after a sibling has reported it."""
        old = self.processes[n]
        if how == "superseded":
            self.processes[n] = self.registered(old.agent, old.name)
        elif how == "gone":
            self.processes[n] = self.registered(old.agent, f"p{next(self.names)}", gone=(old.name,))
        else:
            sibling = self.processes[1 - n]
            self.runner.run(self.engine.fleet.siblings(sibling.agent, sibling.incarnation, gone=[old.name]))
            self.processes[n] = self.registered(old.agent, f"p{next(self.names)}")
        self.former.append(old)
        self.lost(old)

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def a_former_process_calls(self, data: st.DataObject) -> None:
        """It may do nothing any more, and its reports about others change nothing."""
        old = data.draw(st.sampled_from(self.former))
        fleet = self.engine.fleet
        with pytest.raises(SupersededError):
            self.runner.run(self.engine.claims.claim(old.agent, old.incarnation, start=True))
        others = [process.name for process in self.processes if process.agent == old.agent]
        with pytest.raises(SupersededError):
            self.runner.run(fleet.siblings(old.agent, old.incarnation, gone=others))

    @invariant()
    def the_database_says_what_the_model_says(self) -> None:
        if not hasattr(self, "look"):
            return
        rows = self.look.execute("SELECT id, status::text, attempts FROM lineshaft.tasks").fetchall()
        found = {row[0]: (row[1], row[2]) for row in rows}
        assert found == {name: (task.status, task.attempts) for name, task in self.tasks.items()}
        held = self.look.execute(
            "SELECT id, agent_id, incarnation FROM lineshaft.task_live WHERE agent_id IS NOT NULL"
        ).fetchall()
        assert {row[0]: row[1:] for row in held} == {
            name: (task.agent.agent, task.agent.incarnation)
            for name, task in self.tasks.items()
            if task.agent is not None
        }
        instances = self.look.execute("SELECT agent_id, name, incarnation FROM lineshaft.instance").fetchall()
        assert sorted(instances) == sorted(self.processes)
        check_invariants(self.look)

    @invariant()
    def the_breaker_is_where_its_model_is(self) -> None:
        if not hasattr(self, "look"):
            return
        row = self.look.execute(
            "SELECT state::text, failures, last_failure, opened_at, half_open_at, probe_task_id, forced"
            " FROM lineshaft.breaker WHERE key = 't'"
        ).fetchone()
        own = self.breaker
        assert row is not None or own == Breaker()
        assert row is None or row == (
            own.state,
            own.failures,
            own.last_failure,
            own.opened_at,
            own.half_open_at,
            own.probe_task_id,
            own.forced,
        )
