"""What happens to a claimed task until it ends. Every operation takes many tasks and is one transaction.

Each call names the claim by its epoch. Whoever holds an older one changes nothing and is told so; what it
wanted to hand in is kept as an event. Repeating a call that won answers as it did the first time.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

import msgspec
from psycopg.rows import class_row

from lineshaft.errors import StaleClaimError, SupersededError
from lineshaft.model import breaker, budget, graph, ratelimit, retry
from lineshaft.model.priority import Lane
from lineshaft.model.states import Status
from lineshaft.model.storable import check_json
from lineshaft.model.tasks import policy
from lineshaft.sql import catalog
from lineshaft.store.breakers import Breakers, FailedAttempt
from lineshaft.store.changes import UNREPORTED, Changes, LockedTask, Spent
from lineshaft.store.claims import LOCK_TTL_SEC
from lineshaft.store.database import Connection, Database
from lineshaft.store.guards import Guards, RateLimited
from lineshaft.store.lanes import Lanes, array_literal, column_literal
from lineshaft.store.outcomes import (
    HELD,
    Beat,
    ClaimRef,
    Completion,
    Failure,
    Moved,
    record_failure,
    refusal,
)
from lineshaft.store.round_trip import Rows, round_trip, transaction
from lineshaft.store.shortcut import Shortcut


class Gatekeeper(Protocol):
    """What looks at outputs that must be checked (store/gates.py)."""

    async def begin(self, connection: Connection, ids: Sequence[str]) -> None:
        """In the transaction in which they are handed in."""
        ...

    async def check(self, claims: Sequence[ClaimRef]) -> dict[str, Moved]:
        """Afterwards; gives what became of those that it could tell about at once."""
        ...


class Lifecycle:
    #: None: whatever must be checked stays VALIDATING.
    gatekeeper: Gatekeeper | None = None

    def __init__(
        self,
        database: Database,
        lanes: Lanes,
        *,
        uniform: retry.Uniform = random.random,
        breakers: Breakers | None = None,
    ) -> None:
        self._database = database
        self._lanes = lanes
        self._uniform = uniform
        self._breakers = breakers or Breakers(database)
        self._guards = Guards(database)
        self._sql = catalog.load("lifecycle")
        self._complete_plain = catalog.load("shortcuts")["complete_plain"]
        self._shortcut = Shortcut()

    # In an agent's hands.

    async def start(self, claims: Sequence[ClaimRef]) -> list[Moved]:
        call = self._sql["start_tasks"], {**self._database.now, **_claim_columns(claims)}
        (rows,) = await self._database.run_alone(lambda own: round_trip(own, call))
        started = {row[0] for row in rows}
        if all(claim.id in started for claim in claims):
            return [Moved(claim.id, Status.RUNNING) for claim in claims]
        return await self._database.run(
            lambda own: self._answer(own, claims, started, Status.RUNNING, "start")
        )

    async def heartbeat(self, agent_id: str, incarnation: int, beats: Sequence[Beat] = ()) -> dict[str, str]:
        """Renew the leases; tells for each task `continue`, `cancel` (it was cancelled) or `lost`."""

        async def work(connection: Connection) -> dict[str, str]:
            # Tasks before their agent, as everywhere: else this and a completion might wait for each other.
            answers = await self._renew(connection, agent_id, beats) if beats else {}
            touched = await connection.execute(
                self._sql["touch_agent"],
                {**self._database.now, "agent_id": agent_id, "incarnation": incarnation},
            )
            if await touched.fetchone() is None:
                raise SupersededError(
                    f"Agent {agent_id!r} is not registered with incarnation {incarnation}: it was registered "
                    "again elsewhere. This process must stop."
                )
            return answers

        return await self._database.run(work)

    async def _renew(self, connection: Connection, agent_id: str, beats: Sequence[Beat]) -> dict[str, str]:
        cursor = await connection.execute(
            self._sql["heartbeat"],
            {
                **self._database.now,
                **_claim_columns([beat.claim for beat in beats]),
                "agent_id": agent_id,
                "lock_ttl": LOCK_TTL_SEC,
                "progress": [_text(beat.progress) for beat in beats],
                "costs": [beat.spent.cost_usd for beat in beats],
            },
        )
        answers = {row[0]: "continue" for row in await cursor.fetchall()}
        missing = {beat.claim.id: beat.claim.epoch for beat in beats if beat.claim.id not in answers}
        if missing:
            # One that was not started yet is still held, but only its start ends the wait for it.
            found = await connection.execute(self._sql["read_live"], {"ids": list(missing)})
            for name, epoch, status in await found.fetchall():
                if status == Status.CLAIMED and epoch == missing[name]:
                    answers[name] = "continue"
                    del missing[name]
        if missing:
            ends = await connection.execute(self._sql["read_ends"], {"ids": list(missing)})
            cancelled = {row[0] for row in await ends.fetchall() if row[2] == Status.CANCELLED}
            answers |= {name: "cancel" if name in cancelled else "lost" for name in missing}
        return answers

    async def save_step(
        self, claim: ClaimRef, name: str, data: bytes, *, cost_usd: Decimal = Decimal(0)
    ) -> bytes:
        """Record a step's result; gives the one that counts, which is the first."""
        check_json(data=data)
        values = {"name": name, "data": data.decode(), "cost": cost_usd}
        return bytes((await self._save("save_step", claim, values))[0] or b"null")

    async def save_checkpoint(self, claim: ClaimRef, data: bytes) -> None:
        check_json(data=data)
        await self._save("save_checkpoint", claim, {"data": data.decode()})

    async def _save(self, statement: str, claim: ClaimRef, values: Mapping[str, Any]) -> tuple[Any, ...]:
        async def work(connection: Connection) -> tuple[Any, ...]:
            cursor = await connection.execute(
                self._sql[statement],
                {**self._database.now, "id": claim.id, "epoch": claim.epoch, **values},
            )
            row = await cursor.fetchone()
            if row is None:
                (refused,) = await self._answer(connection, [claim], set(), Status.RUNNING, "write to")
                refused.unwrap()
            return row or ()

        return await self._database.run(work)

    # Ending well.

    async def complete(self, completions: Sequence[Completion]) -> list[Moved]:
        """Record the output; a task with gates goes to VALIDATING, and on as its gates say."""
        done: set[str] = set()
        if completions and self._shortcut.is_open():
            call = self._complete_plain, {**self._database.now, **_completion_columns(completions)}
            (rows,) = await self._database.run_alone(lambda own: round_trip(own, call))
            done = {row[0] for row in rows}
            self._shortcut.tried(worked=2 * len(done) >= len(completions))
        rest = [item for item in completions if item.claim.id not in done]
        answers = iter(await self._complete(rest) if rest else ())
        return [
            Moved(item.claim.id, Status.COMPLETED) if item.claim.id in done else next(answers)
            for item in completions
        ]

    async def _complete(self, completions: Sequence[Completion]) -> list[Moved]:
        parameters = {**self._database.now, **_completion_columns(completions), "accepted": False}
        steps = ("lock_dependents", "complete_tasks", "unblock_dependents")

        async def work(connection: Connection) -> list[Moved]:
            calls = [(self._sql[step], parameters) for step in steps]
            async with transaction(connection, *calls) as (_, done, unblocked):
                await self._after_completion(connection, done, unblocked)
                moved = {row[0]: Moved(row[0], Status.COMPLETED) for row in done}
                rest = [item for item in completions if item.claim.id not in moved]
                if rest:
                    moved |= await self._complete_specially(connection, rest)
            return [moved[item.claim.id] for item in completions]

        answers = await self._database.run_alone(work)
        handed_in = [
            item.claim
            for item, answer in zip(completions, answers, strict=True)
            if answer.status is Status.VALIDATING
        ]
        if not handed_in or self.gatekeeper is None:
            return answers
        checked = await self.gatekeeper.check(handed_in)
        return [checked.get(answer.id, answer) for answer in answers]

    async def accept(self, connection: Connection, completions: Sequence[Completion]) -> None:
        """The gates have let these pass: VALIDATING → COMPLETED. Their tasks are locked."""
        parameters = {**self._database.now, **_completion_columns(completions), "accepted": True}
        done = await connection.execute(self._sql["complete_tasks"], parameters)
        unblocked = await connection.execute(self._sql["unblock_dependents"], parameters)
        await self._after_completion(connection, await done.fetchall(), await unblocked.fetchall())

    async def reject(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> dict[str, Moved]:
        """The gates have refused these: failed attempts. Their tasks are locked."""
        return await self._fail_locked(connection, failures)

    async def _after_completion(self, connection: Connection, rows: Rows, unblocked: Rows) -> None:
        locks = sorted({row[4] for row in rows if row[3]})
        if locks:
            await connection.execute(self._sql["unpark_lock_waiters"], {"keys": locks})
        dags = sorted({row[1] for row in rows if row[2]})
        if dags:
            await connection.execute(self._sql["unpark_budget_waiters"], {"dag_ids": dags})
            await connection.execute(self._sql["judge_dags"], {**self._database.now, "dag_ids": dags})
        await self.finish_batches(connection, [row[0] for row in unblocked if row[1]])
        await self._breakers.succeeded(connection, [(row[0], row[5]) for row in rows if row[5]])

    async def _complete_specially(
        self, connection: Connection, items: Sequence[Completion]
    ) -> dict[str, Moved]:
        """What didn't complete straight away: gated, too expensive, done before, or not held any more."""
        locked = await self.lock(connection, [item.claim.id for item in items])
        moved: dict[str, Moved] = {}
        over: list[tuple[LockedTask, Failure]] = []
        gated: list[Completion] = []
        rest: list[Completion] = []
        for item in items:
            task = locked.get(item.claim.id)
            if task is not None and task.epoch == item.claim.epoch and task.status == Status.VALIDATING:
                # The same call again: its output is being checked.
                moved[task.id] = Moved(task.id, Status.VALIDATING)
            elif task is None or task.epoch != item.claim.epoch or task.status != Status.RUNNING:
                rest.append(item)
            elif task.max_cost_usd is not None and item.spent.cost(task) > task.max_cost_usd:
                error = f"cost {item.spent.cost(task)} USD, more than max_cost_usd {task.max_cost_usd}"
                over.append(
                    (
                        task,
                        Failure(item.claim, error, retry.FailureCategory.BUDGET_EXCEEDED, spent=item.spent),
                    )
                )
            else:
                gated.append(item)
        if over:
            moved |= await self._fail_locked(connection, over)
        if gated:
            await self._hand_in(connection, gated)
            moved |= {item.claim.id: Moved(item.claim.id, Status.VALIDATING) for item in gated}
        if rest:
            moved |= {answer.id: answer for answer in await self.answer_again(connection, rest)}
        return moved

    async def answer_again(self, connection: Connection, items: Sequence[Completion]) -> list[Moved]:
        """Completions that moved nothing: answered as the first time, or refused."""
        claims = [item.claim for item in items]
        cursor = await connection.execute(self._sql["read_ends"], {"ids": [claim.id for claim in claims]})
        moved = {
            # The same call again, which cost too much the first time.
            row[0]: Moved(row[0], Status.DEAD_LETTERED)
            for row in await cursor.fetchall()
            if row[2:5:2] == _TOO_DEAR and ClaimRef(row[0], row[1]) in claims
        }
        cursor = await connection.execute(
            catalog.load("gates")["answered_before"],
            {"ids": [claim.id for claim in claims], "epochs": [claim.epoch for claim in claims]},
        )
        moved |= {row[0]: Moved(row[0], Status(row[1])) for row in await cursor.fetchall()}
        rest = [item for item in items if item.claim.id not in moved]
        answers = await self._answer(
            connection,
            [item.claim for item in rest],
            set(),
            Status.COMPLETED,
            "complete",
            late={item.claim.id: item.output for item in rest},
        )
        moved |= {answer.id: answer for answer in answers}
        return [moved[claim.id] for claim in claims]

    async def _hand_in(self, connection: Connection, items: Sequence[Completion]) -> None:
        outputs = [
            {
                "data": _raw(i.output),
                "artifacts": _raw(i.artifacts),
                "decision_report": _raw(i.decision_report),
                **({} if i.output_type is None else {"type": i.output_type}),
            }
            for i in items
        ]
        locked = await self.lock(connection, [item.claim.id for item in items])
        await connection.execute(
            self._sql["hand_in"],
            {
                **self._database.now,
                "ids": [item.claim.id for item in items],
                "costs": [item.spent.cost(locked[item.claim.id]) for item in items],
                "tokens_in": [item.spent.tokens_input for item in items],
                "tokens_out": [item.spent.tokens_output for item in items],
                "outputs": [msgspec.json.encode(output).decode() for output in outputs],
            },
        )
        changes = Changes(self._database.now)
        for item in items:
            changes.event(locked[item.claim.id], ["task.validating"])
        await changes.write(connection)
        if self.gatekeeper is not None:
            await self.gatekeeper.begin(connection, [item.claim.id for item in items])

    async def finish_batches(self, connection: Connection, batches: list[str]) -> None:
        """Batches whose children are all done are done themselves, and so may be the batches above them."""
        while batches:
            cursor = await connection.execute(self._sql["batch_outputs"], {"ids": batches})
            outputs: dict[str, dict[str, msgspec.Raw | None]] = {name: {} for name in batches}
            after: dict[str, dict[str, list[str]]] = {name: {} for name in batches}
            for parent, child, output, before in await cursor.fetchall():
                outputs[parent][child] = _raw(output)
                after[parent][child] = before
            changes = Changes(self._database.now)
            for task in (await self.lock(connection, batches)).values():
                listed = [name for name in graph.order(after[task.id]) if name in outputs[task.id]]
                output = msgspec.json.encode([outputs[task.id][name] for name in listed])
                changes.end(task, Status.COMPLETED, spent=UNREPORTED, output=output)
                changes.event(task, ["task.completed"])
            batches = await changes.write(connection)

    # Ending badly, or not yet.

    async def fail(self, failures: Sequence[Failure]) -> list[Moved]:
        """A failed attempt: retried, waited for (a rate limit), or dead-lettered, as the model decides."""

        async def work(connection: Connection) -> list[Moved]:
            locked = await self.lock_with_dependents(connection, [item.claim.id for item in failures])
            held = []
            rest = []
            for item in failures:
                task = locked.get(item.claim.id)
                if task is not None and task.epoch == item.claim.epoch and task.status in HELD:
                    # Once, also if the call names it twice.
                    held.append((task, item))
                    del locked[task.id]
                else:
                    rest.append(item)
            moved = await self._fail_locked(connection, held)
            if rest:
                claims = [item.claim for item in rest]
                moved = {m.id: m for m in await self._answer(connection, claims, set(), None, "fail")} | moved
            return [moved[item.claim.id] for item in failures]

        return await self._database.run(work)

    async def fail_held(self, connection: Connection, agent_id: str, ids: Sequence[str]) -> None:
        """Everything that an agent holds fails because it was registered again."""
        if not ids:
            return
        locked = await self.lock_with_dependents(connection, ids)
        await self._fail_locked(
            connection,
            [
                (task, _system_failure(task, retry.SystemReason.AGENT_RESTARTED))
                for task in locked.values()
                if task.agent_id == agent_id and task.status in HELD
            ],
        )

    async def expire(
        self,
        connection: Connection,
        ids: Sequence[str],
        reason_of: Callable[[LockedTask], retry.SystemReason],
    ) -> list[str]:
        """Tasks whose lease has run out fail; gives the reasons."""
        held = [t for t in (await self.lock_with_dependents(connection, ids)).values() if t.status in HELD]
        reasons = [reason_of(task) for task in held]
        await self._fail_locked(
            connection,
            [(task, _system_failure(task, reason)) for task, reason in zip(held, reasons, strict=True)],
        )
        return [reason.value for reason in reasons]

    async def _fail_locked(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> dict[str, Moved]:
        if not failures:
            return {}
        cursor = await connection.execute(
            self._sql["failed_agents"],
            {"ids": [t.id for t, _ in failures], "revivals": [t.revivals for t, _ in failures]},
        )
        agents: dict[str, list[str | None]] = dict(await cursor.fetchall())
        changes = Changes(self._database.now)
        moved: dict[str, Moved] = {}
        dead: list[LockedTask] = []
        limits: list[RateLimited] = []
        against: list[FailedAttempt] = []
        for task, reported in failures:
            failure = _overdrawn(task, reported)
            decision = self._decide(task, failure, [*agents.get(task.id, []), task.agent_id])
            lane_id = task.lane_id
            if isinstance(decision, retry.Retry):
                lane_id = await self._lane(connection, task, decision.models)
            status = record_failure(changes, task, failure, decision, lane_id)
            moved[task.id] = Moved(task.id, status)
            if status is Status.DEAD_LETTERED:
                dead.append(task)
            if isinstance(decision, ratelimit.WaitForLimit):
                limits.append(RateLimited(task.agent_id, task.model, decision.slowdown_sec, failure.error))
            elif breaker.counts_against(failure.kind):
                against.append(FailedAttempt(task.id, task.type, task.model))
        await self._fail_batches(connection, changes, dead)
        await self.finish(connection, changes)
        await self._breakers.failed(connection, against)
        await self._guards.signal_slowdowns(connection, limits)
        return moved

    def _decide(
        self, task: LockedTask, failure: Failure, agents: list[str | None]
    ) -> retry.Retry | retry.DeadLetter | ratelimit.WaitForLimit:
        rules = policy(msgspec.json.decode(task.retry) if task.retry else None, task.preset)
        if failure.is_rate_limit:
            told = failure.error if failure.retry_after_sec is None else failure.retry_after_sec
            now = self._database.now["now"] or datetime.now(UTC)
            waited = ratelimit.decide_rate_limit(
                waits_so_far=task.rate_limits,
                retry_after_sec=ratelimit.parse_retry_after(told, now),
                spent_quota=ratelimit.is_spent_quota(failure.error),
                uniform=self._uniform,
                refused=rules.refuses(failure.kind),
            )
            total = task.cost_usd + failure.spent.cost(task)
            if budget.total_limit_reached(total, task.max_total_cost_usd):
                # Waits use no attempts, but they use money: no way around the limit.
                return retry.DeadLetter(retry.DeadLetterReason.BUDGET_EXCEEDED, poison_pill=False)
            if isinstance(waited, ratelimit.WaitForLimit):
                return waited
            if isinstance(waited, ratelimit.QuotaSpent):
                return retry.DeadLetter(retry.DeadLetterReason.QUOTA_SPENT, poison_pill=False)
        return retry.decide_failure(
            category=failure.kind,
            attempts=task.attempts + 1,
            max_attempts=task.max_attempts,
            policy=rules,
            failed_agents=agents,
            uniform=self._uniform,
            total_cost_usd=task.cost_usd + failure.spent.cost(task),
            max_total_cost_usd=task.max_total_cost_usd,
            model_preferences=task.model_preferences,
            fallback_models=task.fallback_models,
        )

    async def _lane(self, connection: Connection, task: LockedTask, models: Sequence[str]) -> int:
        """The lane of the next attempt: another one, once the fallback models are in force."""
        if list(models) == task.model_preferences:
            return task.lane_id
        lane = Lane(
            task.type,
            tuple(task.required_capabilities),
            tuple(models),
            task.priority_boost_per_minute,
            task.max_cost_usd,
        )
        return (await self._lanes.find(connection, [lane]))[lane]

    async def _fail_batches(self, connection: Connection, changes: Changes, dead: list[LockedTask]) -> None:
        """A child that failed for good takes its batch along: siblings cancelled, parent dead (R-193)."""
        seen = {task.id for task in dead}
        while parents := sorted({t.parent_id for t in dead if t.parent_id is not None} - seen):
            causes = {t.parent_id: t for t in dead}
            families = await self.lock(connection, parents)
            batches = [task for task in families.values() if task.is_batch]
            siblings = await self._descendants(connection, [task.id for task in batches], seen)
            for task in (await self.lock(connection, siblings)).values():
                changes.end(task, Status.CANCELLED, spent=UNREPORTED, reason="sibling failed")
                changes.attempt(task, "cancelled", spent=UNREPORTED)
                changes.event(task, ["task.cancelled"], {"reason": "sibling failed"})
            for task in batches:
                reason = f"child {causes[task.id].id} failed"
                changes.end(
                    task, Status.DEAD_LETTERED, spent=UNREPORTED, reason=reason, category="dependency"
                )
                changes.event(task, ["task.dead_lettered"], {"reason": reason})
            seen |= {*parents, *siblings}
            dead = batches

    async def _descendants(self, connection: Connection, ids: list[str], without: set[str]) -> list[str]:
        """Children of these tasks, and theirs; not those of the ones left out."""
        found: dict[str, None] = {}
        while ids:
            cursor = await connection.execute(self._sql["children"], {"ids": ids})
            ids = [row[0] for row in await cursor.fetchall() if row[0] not in found and row[0] not in without]
            found |= dict.fromkeys(ids)
        return list(found)

    async def release(
        self,
        claims: Sequence[ClaimRef],
        *,
        delay_sec: float | None = None,
        spent: Mapping[str, Spent] | None = None,
    ) -> list[Moved]:
        """Hand back without using an attempt; with a delay it comes back later. `spent`: by task."""

        async def work(connection: Connection) -> list[Moved]:
            locked = await self.lock(connection, [claim.id for claim in claims])
            changes = Changes(self._database.now)
            target = Status.PENDING if delay_sec else Status.READY
            moved = set()
            for claim in claims:
                task = locked.get(claim.id)
                if task is None or task.epoch != claim.epoch or task.status not in _STARTABLE:
                    continue
                # Once, also if the call names it twice.
                del locked[task.id]
                used = (spent or {}).get(task.id, UNREPORTED).no_less_than_known(task)
                changes.requeue(task, target, delay_sec=delay_sec or None, spent=used)
                changes.attempt(task, "released", spent=used)
                kinds = ["task.released"] if delay_sec else ["task.released", "task.ready"]
                changes.event(task, kinds, {"delay_sec": delay_sec} if delay_sec else None)
                moved.add(task.id)
            await changes.write(connection)
            return await self._answer(connection, claims, moved, target, "release")

        return await self._database.run(work)

    # What all of them need, and other modules too.

    async def finish(self, connection: Connection, changes: Changes) -> None:
        """Write changes that may end the children of batches."""
        await self.finish_batches(connection, await changes.write(connection))

    async def hold(self, connection: Connection, claim: ClaimRef, verb: str) -> LockedTask:
        """Lock the RUNNING task of a claim that is still held, or refuse."""
        task = (await self.lock(connection, [claim.id])).get(claim.id)
        if task is None or task.epoch != claim.epoch or task.status != Status.RUNNING:
            (refused,) = await self._answer(connection, [claim], set(), None, verb)
            raise refused.error or StaleClaimError(
                f"Can't {verb} task {claim.id} with the claim of epoch {claim.epoch}: it is {refused.status} "
                "now. The claim ended; stop working on this task."
            )
        return task

    async def lock(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedTask]:
        if not ids:
            return {}
        async with connection.cursor(row_factory=class_row(LockedTask)) as cursor:
            await cursor.execute(self._sql["lock_tasks"], {"ids": list(ids)})
            return {task.id: task for task in await cursor.fetchall()}

    async def lock_with_dependents(self, connection: Connection, ids: Sequence[str]) -> dict[str, LockedTask]:
        await connection.execute(self._sql["lock_dependents"], {"ids": list(ids)})
        return await self.lock(connection, ids)

    async def log(self, connection: Connection, kind: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """`rows` are (task, dag, agent, epoch)."""
        if rows:
            ids, dags, agents, epochs = map(list, zip(*rows, strict=True))
            await connection.execute(
                self._sql["insert_events"],
                {
                    **self._database.now,
                    "kinds": ["{" + kind + "}"] * len(ids),
                    "task_ids": ids,
                    "dag_ids": dags,
                    "agent_ids": agents,
                    "epochs": epochs,
                    "data": [None] * len(ids),
                },
            )

    async def _answer(
        self,
        connection: Connection,
        claims: Sequence[ClaimRef],
        moved: set[str],
        target: Status | None,
        verb: str,
        *,
        late: Mapping[str, bytes | None] | None = None,
    ) -> list[Moved]:
        """One answer a claim; for those that didn't move, why."""
        unmoved = [claim.id for claim in claims if claim.id not in moved]
        live: dict[str, tuple[int, str]] = {}
        ends: dict[str, tuple[int, str]] = {}
        if unmoved:
            cursor = await connection.execute(self._sql["read_live"], {"ids": unmoved})
            live = {row[0]: (row[1], row[2]) for row in await cursor.fetchall()}
            cursor = await connection.execute(self._sql["read_ends"], {"ids": unmoved})
            ends = {row[0]: (row[1], row[2]) for row in await cursor.fetchall()}
        answers = []
        stale = []
        for claim in claims:
            if claim.id in moved:
                answers.append(Moved(claim.id, target))
                continue
            answer = refusal(claim, live.get(claim.id), ends.get(claim.id), target, verb)
            if isinstance(answer.error, StaleClaimError) and late is not None:
                stale.append((claim, late.get(claim.id)))
            answers.append(answer)
        for claim, output in stale:
            await connection.execute(
                self._sql["log_late_result"],
                {**self._database.now, "id": claim.id, "epoch": claim.epoch, "output": _text(output)},
            )
        return answers


#: Status and category.
_TOO_DEAR = (Status.DEAD_LETTERED, retry.FailureCategory.BUDGET_EXCEEDED)
_STARTABLE = frozenset({Status.CLAIMED, Status.RUNNING})


def _system_failure(task: LockedTask, reason: retry.SystemReason) -> Failure:
    return Failure(ClaimRef(task.id, task.epoch), reason.value, reason.value)


def _overdrawn(task: LockedTask, failure: Failure) -> Failure:
    """However an attempt failed: if it cost more than it may, that is why it isn't tried again (R-235)."""
    cost = failure.spent.cost(task)
    if failure.kind == retry.FailureCategory.BUDGET_EXCEEDED or not budget.over_task_limit(
        cost, task.max_cost_usd
    ):
        return failure
    error = f"cost {cost} USD, more than max_cost_usd {task.max_cost_usd}; and: {failure.error}"
    return replace(failure, error=error, category=retry.FailureCategory.BUDGET_EXCEEDED)


def _claim_columns(claims: Sequence[ClaimRef]) -> dict[str, Any]:
    return {
        "ids": array_literal([claim.id for claim in claims]),
        "epochs": array_literal([claim.epoch for claim in claims]),
    }


def _completion_columns(items: Sequence[Completion]) -> dict[str, Any]:
    return {
        **_claim_columns([item.claim for item in items]),
        "outputs": column_literal([_text(item.output) for item in items]),
        "artifacts": column_literal([_text(item.artifacts) for item in items]),
        "reports": column_literal([_text(item.decision_report) for item in items]),
        "output_types": column_literal([item.output_type for item in items]),
        "costs": column_literal([item.spent.cost_usd for item in items]),
        "tokens_in": column_literal([item.spent.tokens_input for item in items]),
        "tokens_out": column_literal([item.spent.tokens_output for item in items]),
    }


def _text(json: bytes | None) -> str | None:
    return None if json is None else json.decode()


def _raw(json: bytes | None) -> msgspec.Raw | None:
    return None if json is None else msgspec.Raw(json)
