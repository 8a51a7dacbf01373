"""Tasks that end well: their output is recorded, and whoever waited for them may go on."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from lineshaft.engine.claim.fast_path import FastPath
from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.literals import column_literal, json_text, raw_json
from lineshaft.engine.postgres.pipeline import Rows, pipelined, transaction
from lineshaft.engine.transition.changes import Changes, LockedTask
from lineshaft.engine.transition.fail import Failing
from lineshaft.engine.transition.outcomes import claim_columns, has_duplicate_tasks
from lineshaft.model import retry
from lineshaft.model.states import Status
from lineshaft.types.work import ClaimRef, Completion, Failure, Moved

_SQL = catalog.load("transition/changes", "transition/complete", "transition/task_locks")
_COMPLETE_PLAIN = catalog.load("claim/fast_path")["complete_plain"]


class Gatekeeper(Protocol):
    """What looks at outputs that must be checked (store/gates.py)."""

    async def begin(self, connection: Connection, ids: Sequence[str]) -> None:
        """In the transaction in which they are handed in."""
        ...

    async def check(self, claims: Sequence[ClaimRef]) -> dict[str, Moved]:
        """Afterwards; gives what became of those that it could tell about at once."""
        ...


class Completing(Failing):
    #: None: whatever must be checked stays VALIDATING.
    gatekeeper: Gatekeeper | None = None

    @cached_property
    def _shortcut(self) -> FastPath:
        return FastPath()

    async def complete(self, completions: Sequence[Completion]) -> list[Moved]:
        """Record the output; a task with gates goes to VALIDATING, and on as its gates say."""
        if has_duplicate_tasks([item.claim for item in completions]):
            return [answer for item in completions for answer in await self.complete([item])]
        done: set[str] = set()
        if completions and self._shortcut.is_open():
            call = _COMPLETE_PLAIN, {**self._database.now, **_completion_columns(completions)}
            (rows,) = await self._database.run_alone(lambda own: pipelined(own, call))
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
            calls = [(_SQL[step], parameters) for step in steps]
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
        done = await connection.execute(_SQL["complete_tasks"], parameters)
        unblocked = await connection.execute(_SQL["unblock_dependents"], parameters)
        await self._after_completion(connection, await done.fetchall(), await unblocked.fetchall())

    async def reject(
        self, connection: Connection, failures: Sequence[tuple[LockedTask, Failure]]
    ) -> dict[str, Moved]:
        """The gates have refused these: failed attempts. Their tasks are locked."""
        return await self._fail_locked(connection, failures)

    async def _after_completion(self, connection: Connection, rows: Rows, unblocked: Rows) -> None:
        locks = sorted({row[4] for row in rows if row[3]})
        if locks:
            await connection.execute(_SQL["unpark_lock_waiters"], {"keys": locks})
        dags = sorted({row[1] for row in rows if row[2]})
        if dags:
            await connection.execute(_SQL["unpark_budget_waiters"], {"dag_ids": dags})
            await connection.execute(_SQL["judge_dags"], {**self._database.now, "dag_ids": dags})
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
        cursor = await connection.execute(_SQL["read_ends"], {"ids": [claim.id for claim in claims]})
        moved = {
            # The same call again, which cost too much the first time.
            row[0]: Moved(row[0], Status.DEAD_LETTERED)
            for row in await cursor.fetchall()
            if row[2:5:2] == _TOO_DEAR and ClaimRef(row[0], row[1]) in claims
        }
        cursor = await connection.execute(
            catalog.load("review/gates")["answered_before"],
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
                "data": raw_json(i.output),
                "artifacts": raw_json(i.artifacts),
                "decision_report": raw_json(i.decision_report),
                **({} if i.output_type is None else {"type": i.output_type}),
            }
            for i in items
        ]
        locked = await self.lock(connection, [item.claim.id for item in items])
        await connection.execute(
            _SQL["hand_in"],
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


#: Status and category.
_TOO_DEAR = (Status.DEAD_LETTERED, retry.FailureCategory.BUDGET_EXCEEDED)


def _completion_columns(items: Sequence[Completion]) -> dict[str, Any]:
    return {
        **claim_columns([item.claim for item in items]),
        "outputs": column_literal([json_text(item.output) for item in items]),
        "artifacts": column_literal([json_text(item.artifacts) for item in items]),
        "reports": column_literal([json_text(item.decision_report) for item in items]),
        "output_types": column_literal([item.output_type for item in items]),
        "costs": column_literal([item.spent.cost_usd for item in items]),
        "tokens_in": column_literal([item.spent.tokens_input for item in items]),
        "tokens_out": column_literal([item.spent.tokens_output for item in items]),
    }
