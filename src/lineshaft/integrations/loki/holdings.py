"""The claims that a mirror holds for the programs of its folder.

A task that is *offered* is claimed by the agent `loki`, so no agent of Lineshaft can take it, and its record
is shown unclaimed. Once a program has claimed the record, the claim is handed over to an agent of the
program's name : the task is *taken*. The mirror renews its lease for as long as it lives.

All these agents have one instance of the folder's name. Its claims are found by that name after a restart.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from lineshaft.engine.engine import Engine
from lineshaft.integrations.loki.records import error_text
from lineshaft.model.fields import encoded_json
from lineshaft.model.states import Status
from lineshaft.types import NewAgent, NewTask, Submitted, Task
from lineshaft.types.work import ClaimRef, Completion, Failure, HeldTask, Presence, Release

#: The agent that holds what no program has taken yet.
FOLDER_AGENT = "loki"
#: Offers have no lease: they are withdrawn and made again long before this is over.
CLAIM_TTL_SEC = 600.0
#: What is taken survives three of these without a mirror.
HEARTBEAT_SEC = 60.0
_SLOTS = 10_000


class Held(Struct, frozen=True):
    claim: ClaimRef
    holder: Presence
    since: datetime
    #: A program has claimed it.
    taken: bool


#: Claims that are released at once.
_CHUNK = 500


class Holdings:
    def __init__(self, engine: Engine, instance: str) -> None:
        self.instance = instance
        self._engine = engine
        self._agents: dict[str, Presence] = {}
        self._held: dict[str, Held] = {}

    def __getitem__(self, task_id: str) -> Held | None:
        return self._held.get(task_id)

    @property
    def offered(self) -> dict[str, Held]:
        return {name: held for name, held in self._held.items() if not held.taken}

    @property
    def taken(self) -> dict[str, Held]:
        return {name: held for name, held in self._held.items() if held.taken}

    def observe(self, task: Task) -> None:
        """Take over what the database says: a claim of this folder's, or that it has ended."""
        claim = task.claim
        live = task.status in {Status.CLAIMED, Status.RUNNING}
        if not live or claim.instance != self.instance or claim.agent_id is None:
            self._held.pop(task.id, None)
            return
        known = self._held.get(task.id)
        if known is not None and known.claim.epoch == claim.epoch:
            return
        holder = self._agents.get(claim.agent_id)
        if holder is not None:
            taken = task.status is Status.RUNNING
            since = claim.claimed_at or datetime.now(UTC)
            self._held[task.id] = Held(ClaimRef(task.id, claim.epoch), holder, since, taken)

    def forget(self, task_id: str) -> None:
        self._held.pop(task_id, None)

    async def agent(self, name: str) -> Presence:
        """The instance of this folder of an agent, registered if it isn't."""
        if name not in self._agents:
            agent = NewAgent(
                id=name,
                instance=self.instance,
                type="loki",
                max_concurrent_tasks=_SLOTS,
                claim_ttl_sec=CLAIM_TTL_SEC,
                heartbeat_interval_sec=HEARTBEAT_SEC,
            )
            # With the same key the same instance: what it holds from before a restart stays.
            registered = await self._engine.fleet.register(agent, key=f"{self.instance}/{name}")
            self._agents[name] = Presence(name, registered.incarnation)
        return self._agents[name]

    async def offer(self, number: int) -> list[str]:
        """Claim up to so many tasks for the folder, best first."""
        own = await self.agent(FOLDER_AGENT)
        claim = await self._engine.claims.claim(own.agent_id, own.incarnation, limit=number, start=False)
        for task in claim.tasks:
            self._held[task.id] = Held(ClaimRef(task.id, task.epoch), own, task.claimed_at, taken=False)
        return [task.id for task in claim.tasks]

    async def withdraw(self, names: Iterable[str]) -> None:
        """Give offers up; no attempt is used."""
        claims = [self._held.pop(name).claim for name in names if name in self._held]
        for start in range(0, len(claims), _CHUNK):
            await self._engine.work.release([Release(claim) for claim in claims[start : start + _CHUNK]])

    async def take(self, task_id: str, name: str) -> None:
        """A program has claimed an offer."""
        held = self._held[task_id]
        to = await self.agent(name)
        claim = await self._engine.work.transfers.hand_over(held.claim, to)
        if claim is None:
            # The queue is paused, say. The program works on it all the same, so it stays claimed.
            await self._engine.work.start([held.claim])
            claim, to = held.claim, held.holder
        self._held[task_id] = Held(claim, to, datetime.now(UTC), taken=True)

    async def submit_taken(self, task: NewTask, name: str) -> Submitted | None:
        """Submit a task that a program works on already; None: it can't have it."""
        return await self._submit(task, await self.agent(name), taken=True)

    async def submit_offered(self, task: NewTask) -> Submitted | None:
        """Submit a task that programs can take already, as they see its record; None: it can't be had."""
        return await self._submit(task, await self.agent(FOLDER_AGENT), taken=False)

    async def _submit(self, task: NewTask, to: Presence, *, taken: bool) -> Submitted | None:
        made = await self._engine.work.transfers.submit_claimed(task, to, start=taken)
        if made is None:
            return None
        submitted, claim = made
        self._held[submitted.id] = Held(claim, to, datetime.now(UTC), taken=taken)
        return submitted

    async def complete(self, task_id: str, result: Any) -> None:
        held = await self._started(task_id)
        found: Mapping[str, Any] = result if isinstance(result, dict) else {"output": result}
        report = found.get("decisionReport")
        completion = Completion(
            held.claim,
            output=_json(found.get("output")),
            decision_report=None if report is None else _json(report),
        )
        (moved,) = await self._engine.work.complete([completion])
        self.forget(task_id)
        moved.unwrap()

    async def fail(self, task_id: str, error: Any) -> None:
        held = await self._started(task_id)
        (moved,) = await self._engine.work.fail([Failure(held.claim, error_text(error))])
        self.forget(task_id)
        moved.unwrap()

    async def release(self, task_id: str) -> None:
        await self.withdraw([task_id])

    async def _started(self, task_id: str) -> Held:
        held = self._held[task_id]
        if not held.taken:
            await self._engine.work.start([held.claim])
        return held

    async def heartbeat(self) -> set[str]:
        """Renew all leases; returns the tasks that are no longer held."""
        if not self._agents:
            return set()
        held = [
            HeldTask(name, held.claim.epoch, held.holder) for name, held in self._held.items() if held.taken
        ]
        answers = await self._engine.work.heartbeat(list(self._agents.values()), held)
        for presence in set(self._agents.values()) - answers.agents.keys():
            # Removed after a long silence: it is registered again when it is needed.
            del self._agents[presence.agent_id]
        over = {ended.id for ended in answers.over}
        for name in over:
            self.forget(name)
        return over

    async def others_are_free(self) -> bool:
        """Whether an agent of Lineshaft, outside of this folder, has room for a task."""
        agents = await self._engine.fleet.read_all()
        return any(
            instance.status == "active" and instance.current_tasks < instance.max_concurrent_tasks
            for agent in agents
            for instance in agent.instances
            if instance.instance != self.instance
        )


def _json(value: Any) -> bytes:
    return encoded_json("result", value)
