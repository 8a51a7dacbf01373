import asyncio

from lineshaft import background


async def _ends_at_the_second_cancellation(cancelled: list[int]) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            if len(cancelled) > 1:
                raise


async def _fails() -> None:
    raise ValueError("it broke")


def test_a_task_that_loses_a_cancellation_is_stopped() -> None:
    async def run() -> None:
        cancelled: list[int] = []
        task = asyncio.create_task(_ends_at_the_second_cancellation(cancelled))
        await asyncio.sleep(0)
        await background.stop(task)
        assert task.cancelled()
        assert len(cancelled) == 2

    asyncio.run(run())


def test_the_error_of_a_task_that_has_ended_is_not_raised() -> None:
    async def run() -> None:
        task = asyncio.create_task(_fails())
        await asyncio.wait({task})
        await background.stop(task)
        assert isinstance(task.exception(), ValueError)

    asyncio.run(run())
