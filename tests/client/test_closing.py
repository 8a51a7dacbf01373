"""Closing a client while others wait with it: their waits end with an error."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from lineshaft import Lineshaft, NewTask, SyncLineshaft
from lineshaft.client.blocking import LoopThread
from lineshaft.errors import LineshaftError
from tests.agent.helpers import PATIENCE


class InThread:
    """A thread that keeps the exception of its function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - the test checks it
            self._error = error

    def error(self) -> BaseException | None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it waits forever"
        return self._error


async def test_waiters_get_an_error(where: str) -> None:
    async with Lineshaft(where) as shaft:
        task = await shaft.submit(NewTask("t"))
        waiting = [asyncio.create_task(shaft.wait(task)) for _ in range(2)]
        await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE):
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [LineshaftError] * 2
    assert f"closed while waiting for {task.id}" in str(errors[0])


def test_a_waiting_thread_gets_an_error(where: str) -> None:
    async def somebody_waits() -> None:
        while all(task.get_name() != "lineshaft waits" for task in asyncio.all_tasks()):  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)

    with SyncLineshaft(where) as shaft:
        task = shaft.submit(NewTask("t"))
        waiting = InThread(lambda: shaft.wait(task))
        shaft.loop.run(asyncio.wait_for(somebody_waits(), PATIENCE))

    with pytest.raises(LineshaftError, match="was closed while"):
        raise waiting.error() or AssertionError


def test_any_call_of_a_thread_gets_an_error() -> None:
    loop, begun = LoopThread("test"), threading.Event()

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    waiting = InThread(lambda: loop.run(for_ever()))
    assert begun.wait(PATIENCE)
    loop.close()

    with pytest.raises(LineshaftError, match="Another thread closed this Lineshaft"):
        raise waiting.error() or AssertionError
    with pytest.raises(LineshaftError, match="was closed"):
        loop.run(for_ever())
