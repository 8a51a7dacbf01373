"""Processes of one agent on one machine: the names of their instances, and noticing that one has died."""

import asyncio
import subprocess
import sys

import pytest

from lineshaft import Agent, Lineshaft, NewTask, RetrySpec
from lineshaft.agent import siblings
from lineshaft.client.database_backend import DatabaseBackend
from lineshaft.errors import SupersededError
from lineshaft.model.states import Status
from lineshaft.operations import agents
from lineshaft.types import NewAgent
from lineshaft.types.work import Presence
from tests.agent.helpers import PATIENCE, engine_of, soon
from tests.proxy import proxied

NAME = "from lineshaft.agent import siblings; print(siblings.new_name())"


def name_of_another() -> str:
    """Of an instance whose process has ended."""
    return subprocess.run(
        [sys.executable, "-c", NAME], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_each_agent_of_a_process_has_a_name_of_its_own() -> None:
    """R-083."""
    assert siblings.new_name() != siblings.new_name()
    assert siblings.new_name().startswith(siblings.host_name())


def test_only_a_process_that_can_be_judged_is_known_to_be_dead() -> None:
    """R-083: of the same boot and PID namespace; another process with the same id isn't the same one."""
    own, ended = siblings.new_name(), name_of_another()
    host, boot, namespace, pid, start, number = own.rsplit("/", 5)

    assert siblings.is_dead(ended)
    assert not siblings.is_dead(own)
    assert siblings.is_dead(f"{host}/{boot}/{namespace}/{pid}/{int(start) + 1}/{number}")
    other_boot = "0" * 8 + boot[8:]
    for elsewhere in (ended.replace(boot, other_boot), ended.replace(f"/{namespace}/", "/1/"), "pod-0", ""):
        assert not siblings.is_dead(elsewhere)


@pytest.mark.slow("starts processes")
async def test_a_new_process_reports_all_its_dead_predecessors_before_it_works(shaft: Lineshaft) -> None:
    """R-083: so that it works on their tasks too if it runs until it is idle."""
    handle = await shaft.submit(NewTask("t", retry=RetrySpec(strategy="immediate")))
    fleet = engine_of(shaft).fleet
    host = siblings.host_name()
    _, dead = [
        await fleet.register(NewAgent(id="a", instance=name_of_another(), host=host)) for _ in range(2)
    ]
    await engine_of(shaft).claims.claim("a", dead.incarnation, start=True)
    agent = Agent("a")
    agent.task("t")(lambda: "done")

    await asyncio.wait_for(agent.run(shaft, until_idle=True, handle_signals=False), PATIENCE)

    assert (await shaft.get(handle)).result == "done"
    assert len((await fleet.read("a")).instances) == 1


async def test_a_running_process_notices_that_a_sibling_dies(shaft: Lineshaft) -> None:
    """R-083: what that one held fails at once, not when its lease expires."""
    fleet, host = engine_of(shaft).fleet, siblings.host_name()
    own = await fleet.register(NewAgent(id="a", instance="own", host=host))
    other = await fleet.register(NewAgent(id="a", instance="other", host=host))
    handle = await shaft.submit(NewTask("t"))
    await engine_of(shaft).claims.claim("a", other.incarnation, start=True)
    looked, died = asyncio.Event(), asyncio.Event()

    watching = asyncio.create_task(
        siblings.watch(shaft.backend, Presence("a", own.incarnation), looked, lambda _: died.is_set())
    )
    await soon(looked)
    assert (await shaft.get(handle)).status is Status.RUNNING
    died.set()
    async for event in shaft.events(None, kinds=["task.failed"]):
        assert (event.task_id, event.data["error"]) == (handle.id, "agent_restarted")
        break
    watching.cancel()

    with pytest.raises(SupersededError):
        await fleet.present("a", other.incarnation)
    await fleet.present("a", own.incarnation)


async def test_a_process_works_although_it_can_not_ask_for_siblings(shaft: Lineshaft) -> None:
    """R-083: leases expire as usual."""
    looked = asyncio.Event()
    watching = asyncio.create_task(siblings.watch(shaft.backend, Presence("unknown", 1), looked))

    await soon(looked)

    watching.cancel()


async def test_the_watch_ends_although_its_connection_breaks_at_that_moment(dsn: str) -> None:
    """Found by chaos: it took that for an outage and went on, and its agent never stopped."""
    async with proxied(dsn) as (through, proxy), Lineshaft(through) as shaft:
        backend = shaft.backend
        assert isinstance(backend, DatabaseBackend)
        view = await backend.call(agents.register_agent, agents.RegisterAgent(agent=NewAgent(id="a")))
        proxy.hold()
        async with (
            asyncio.timeout(PATIENCE),
            siblings.watching(backend, Presence("a", view.incarnation), asyncio.Event()),
        ):
            while not backend.engine.database._in_use:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            # So that the call has been sent.
            await asyncio.sleep(0)
            proxy.cut()
