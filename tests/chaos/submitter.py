"""A client of a chaos run (`python -m tests.chaos.submitter`): submits, cancels, revives, corrects costs.

Over the database, or over the HTTP API of whichever server answers. A call whose answer was lost is made
again: its ids are its own, so the second one finds what the first one did.
"""

import argparse
import asyncio
import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from lineshaft import Lineshaft
from lineshaft.errors import AlreadyExistsError, InvalidTransitionError, LineshaftError, NotFoundError
from lineshaft.settings import Settings
from tests.chaos.calling import ANSWER_SEC, AwayError, call
from tests.chaos.history import Recorder, read_file
from tests.chaos.workload import Cancel, Correct, Decide, Operation, Revive, Submit, Workload

_PAUSE_SEC = 0.2


class Queue(Protocol):
    async def submit(self, operation: Submit) -> str: ...

    async def cancel(self, task_id: str) -> str: ...

    async def revive(self) -> tuple[str | None, str]: ...

    async def correct(self, task_id: str, cost_usd: float) -> str: ...

    async def decide(self, decision: Literal["accept", "refuse"] | float) -> tuple[str | None, str]: ...


class OverDatabase:
    def __init__(self, shaft: Lineshaft) -> None:
        self._shaft = shaft

    async def submit(self, operation: Submit) -> str:
        try:
            if operation.is_dag:
                await self._shaft.submit_dag(
                    f"DAG {operation.number}", operation.tasks, budget_ceiling_usd=operation.ceiling_usd
                )
            else:
                await self._shaft.submit_many(operation.tasks)
        except AlreadyExistsError:
            return "known"
        return "ok"

    async def cancel(self, task_id: str) -> str:
        try:
            await self._shaft.cancel(task_id, "chaos")
        except (InvalidTransitionError, NotFoundError) as error:
            return error.code
        return "ok"

    async def revive(self) -> tuple[str | None, str]:
        page = await self._shaft.list(status="DEAD_LETTERED", limit=1)
        if not page.items:
            return None, "none"
        try:
            await self._shaft.retry(page.items[0].id)
        except LineshaftError as error:
            if error.retryable:
                raise
            return page.items[0].id, error.code
        return page.items[0].id, "ok"

    async def correct(self, task_id: str, cost_usd: float) -> str:
        try:
            await self._shaft.correct_cost(task_id, cost_usd, reason="chaos")
        except NotFoundError as error:
            return error.code
        return "ok"

    async def decide(self, decision: Literal["accept", "refuse"] | float) -> tuple[str | None, str]:
        disputed = (await self._shaft.costs(days=1)).disputed
        if not disputed:
            return None, "none"
        if isinstance(decision, str):
            await self._shaft.correct_cost(disputed[0].id, disputed=decision, reason="chaos")
        else:
            await self._shaft.correct_cost(disputed[0].id, decision, reason="chaos")
        return disputed[0].id, "ok"


class OverHttp:
    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    async def submit(self, operation: Submit) -> str:
        tasks = [_body(task, keyed=operation.is_dag) for task in operation.tasks]
        if operation.is_dag:
            body: dict[str, Any] = {"title": f"DAG {operation.number}", "tasks": tasks}
            if operation.ceiling_usd is not None:
                body["budget_ceiling_usd"] = operation.ceiling_usd
            status, answer = await call(self._urls, "POST", "/v1/dags", body)
        else:
            status, answer = await call(self._urls, "POST", "/v1/tasks/batch", {"tasks": tasks})
        if status == 409 and answer["code"] == "already_exists":
            return "known"
        assert status == 201, (status, answer)
        return "ok"

    async def cancel(self, task_id: str) -> str:
        status, answer = await call(self._urls, "POST", f"/v1/tasks/{task_id}/cancel", {"reason": "chaos"})
        return "ok" if status == 200 else str(answer["code"])

    async def revive(self) -> tuple[str | None, str]:
        _, found = await call(self._urls, "GET", "/v1/tasks?status=DEAD_LETTERED&limit=1")
        if not found["items"]:
            return None, "none"
        name = found["items"][0]["id"]
        status, answer = await call(self._urls, "POST", f"/v1/tasks/{name}/retry", {})
        return name, "ok" if status == 200 else str(answer["code"])

    async def correct(self, task_id: str, cost_usd: float) -> str:
        body = {"cost_usd": cost_usd, "reason": "chaos"}
        status, answer = await call(self._urls, "POST", f"/v1/tasks/{task_id}/cost", body)
        return "ok" if status == 200 else str(answer["code"])

    async def decide(self, decision: Literal["accept", "refuse"] | float) -> tuple[str | None, str]:
        _, costs = await call(self._urls, "GET", "/v1/costs?days=1")
        if not costs["disputed"]:
            return None, "none"
        name = costs["disputed"][0]["id"]
        decided = {"disputed": decision} if isinstance(decision, str) else {"cost_usd": decision}
        status, answer = await call(
            self._urls, "POST", f"/v1/tasks/{name}/cost", {**decided, "reason": "chaos"}
        )
        return name, "ok" if status == 200 else str(answer["code"])


def _body(task: Any, *, keyed: bool) -> dict[str, Any]:
    fields = {
        name: value
        for name in task.__struct_fields__
        if (value := getattr(task, name)) is not None and name != "children" and value not in ((), [])
    }
    if not keyed:
        fields.pop("key", None)
    if task.children:
        fields["children"] = [_body(child, keyed=False) for child in task.children]
    return fields


async def perform(queue: Queue, operation: Operation, record: Recorder, over: Callable[[], bool]) -> None:
    """Until it is answered."""
    name = record.next_call()
    record(**_asked(operation), call=name, number=operation.number)
    while True:
        try:
            record("answered", call=name, **await _ask(queue, operation))
        except (AwayError, LineshaftError) as error:
            record("again", call=name, error=f"{type(error).__name__}: {error}"[:300])
            if isinstance(error, LineshaftError) and not error.retryable:
                raise
            # A revival is not made again: by now another dead letter may be the first. A decision neither.
            if over() or isinstance(operation, Revive | Decide):
                return
            await asyncio.sleep(_PAUSE_SEC)
        else:
            return


def _asked(operation: Operation) -> dict[str, Any]:
    match operation:
        case Submit():
            return {"what": "submit", "ids": operation.ids}
        case Cancel():
            return {"what": "cancel", "task": operation.task_id}
        case Revive():
            return {"what": "revive"}
        case Correct():
            return {"what": "correct", "task": operation.task_id, "cost": operation.cost_usd}
        case Decide():
            return {"what": "decide", "decision": operation.decision}


async def _ask(queue: Queue, operation: Operation) -> dict[str, Any]:
    match operation:
        case Submit():
            return {"verdict": await queue.submit(operation)}
        case Cancel():
            return {"verdict": await queue.cancel(operation.task_id)}
        case Revive():
            task_id, verdict = await queue.revive()
            return {"task": task_id, "verdict": verdict}
        case Correct():
            return {"verdict": await queue.correct(operation.task_id, operation.cost_usd)}
        case Decide():
            task_id, verdict = await queue.decide(operation.decision)
            return {"task": task_id, "verdict": verdict}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("history", type=Path)
    parser.add_argument("--dsn")
    parser.add_argument("--url", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--brake", type=Path, help="while this file exists, nothing is asked for")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    path = args.history / f"{args.name}.jsonl"
    done = max((r["number"] for r in read_file(path) if "number" in r), default=0) if path.exists() else 0
    record = Recorder(path, args.name)
    record("started")
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    pace = random.Random(args.seed)
    operations = Workload(args.seed, args.name).operations()

    async def work(queue: Queue) -> None:
        for operation in operations:
            # What it did before it was killed: asked for, and answered or not.
            if operation.number <= done:
                continue
            # Another process makes the file, and removes it.
            while not stopped.is_set() and args.brake is not None and args.brake.exists():  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_SEC)
            if stopped.is_set():
                return
            await perform(queue, operation, record, stopped.is_set)
            await asyncio.sleep(pace.uniform(0, 2 * args.pause))

    if args.url:
        await work(OverHttp(args.url))
        return
    settings = Settings.load(os.environ | {"LINESHAFT_DATABASE_URL": args.dsn})
    while not stopped.is_set():
        try:
            async with Lineshaft(settings=settings, max_connections=2) as shaft:
                shaft.backend.expect_answers_within(ANSWER_SEC)
                await work(OverDatabase(shaft))
        except Exception as error:  # noqa: BLE001 - it could not be opened, or not be closed
            record("interrupted", error=f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(_PAUSE_SEC)


if __name__ == "__main__":
    asyncio.run(main())
