"""SyncLineshaft: the same methods for code without an event loop."""

import asyncio
import os
import threading

import pytest

from lineshaft import Lineshaft, NewTask, SyncLineshaft
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.model.states import Status
from tests.client.helpers import engine_of, finish_all


def test_submit_wait_and_read(blocking: SyncLineshaft) -> None:
    submitted = blocking.submit(NewTask("sum", spec={"n": 1}))
    blocking.loop.run(finish_all(engine_of(blocking.shaft), 42))

    task = blocking.wait(submitted, 30)

    assert (task.status, task.result) == (Status.COMPLETED, 42)
    assert [found.id for found in blocking.list(type="sum").items] == [submitted.id]
    kinds = [event.kind for event in blocking.events(None, task_id=submitted.id, follow=False)]
    assert kinds[-1] == "task.completed"


def test_errors_are_the_same(blocking: SyncLineshaft) -> None:
    with pytest.raises(InvalidInputError, match="priority"):
        blocking.submit(NewTask("sum", priority=1000))
    submitted = blocking.submit(NewTask("sum"))
    with pytest.raises(TimeoutError, match="has not ended"):
        blocking.wait(submitted, 0.05)


def test_threads_share_one(blocking: SyncLineshaft) -> None:
    found: list[str] = []

    def submit() -> None:
        found.append(blocking.submit(NewTask("sum")).id)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(found)) == 8


def test_every_public_method_exists_with_its_documentation() -> None:
    own = {"open", "close", "backend"}
    methods = {name for name in vars(Lineshaft) if not name.startswith("_")} - own

    assert methods <= set(vars(SyncLineshaft))
    assert SyncLineshaft.submit_dag.__doc__ == Lineshaft.submit_dag.__doc__


def test_a_forked_process_must_open_its_own(blocking: SyncLineshaft) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            blocking.get("task_x")
        except LineshaftError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)

    assert b"Open one in each process" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)


def test_it_can_be_opened_inside_an_event_loop(dsn: str) -> None:
    """Web frameworks call synchronous code while an event loop is running."""

    async def main() -> str:
        with SyncLineshaft(dsn) as shaft:
            return shaft.submit(NewTask("sum")).id

    assert asyncio.run(main()).startswith("task_")


def test_using_it_after_close_is_an_error(dsn: str) -> None:
    shaft = SyncLineshaft(dsn)
    with pytest.raises(LineshaftError, match="not open"):
        shaft.get("task_x")
