"""Document locks that Lineshaft and other programs share: who holds them when, and through which failures."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask
from lineshaft.engine.guards.outside import OutsideRows
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import SettingsError
from lineshaft.integrations.officeplane_redis import locks
from lineshaft.integrations.officeplane_redis.lock_keys import Grant, LockKeys
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.settings import Settings
from tests.agent.commands import commands_in
from tests.agent.helpers import drain
from tests.integrations.officeplane.calls import create, look
from tests.integrations.officeplane_redis.program import Program, holder
from tests.invariants import check_invariants
from tests.server.client import Client
from tests.server.conftest import Serve, Served, until
from tests.valkey import Valkey


@asynccontextmanager
async def sharing(serve: Serve, valkey: Valkey, **settings: Any) -> AsyncIterator[Served]:
    async with serve(redis_url=valkey.url, officeplane_locks=True, **settings) as served:
        yield served


async def hold(client: Client, agent: dict[str, Any]) -> tuple[str, str]:
    """Claim and start the next task, as soon as there is one."""
    async with asyncio.timeout(60):
        while not (found := await client.claim(agent, wait_sec=1)):
            pass
    task_id, token = found[0]["task"]["id"], found[0]["claim_token"]
    assert (await client.post(f"/v1/tasks/{task_id}/start", {"claim_token": token})).status == 200
    return task_id, token


async def complete(client: Client, task_id: str, token: str) -> None:
    assert (await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})).status == 200


async def test_a_running_task_holds_the_lock_of_003(serve: Serve, valkey: Valkey, dsn: str) -> None:
    with valkey.client() as redis:
        async with sharing(serve, valkey) as served:
            client = served.client
            made = await create(client, documentId="abc")
            await create(client)
            task_id, token = await hold(client, await client.register())

            assert task_id == made["id"] == holder(redis, "abc")
            assert 590 < redis.ttl("officeplane:doclock:abc") <= 600
            assert not Program(redis, "other").lock("abc")
            await complete(client, task_id, token)
            await until(lambda: holder(redis, "abc") is None)
            assert Program(redis, "other").lock("abc")
    check_invariants(dsn)


async def test_a_document_that_another_program_holds_waits_without_an_attempt(
    serve: Serve, valkey: Valkey, dsn: str
) -> None:
    with valkey.client() as redis:
        program = Program(redis, "5a0c")
        assert program.lock("abc")
        async with sharing(serve, valkey) as served:
            client = served.client
            made = await create(client, documentId="abc")
            elsewhere = await create(client, documentId="other", priority="LOW")
            agent = await client.register()

            assert (await hold(client, agent))[0] == elsewhere["id"], "other documents go on"
            found = await look(client, made["id"])
            assert (found["state"], found["retryCount"]) == ("QUEUED", 0)
            assert found["blockedReason"] == (
                "Lock 'doc:abc' is held by another program (5a0c) until that releases it."
            )
            assert holder(redis, "abc") == "5a0c"
            program.unlock("abc")
            task_id, token = await hold(client, agent)
            assert task_id == made["id"] == holder(redis, "abc")
            await complete(client, task_id, token)
            attempts = (await client.get(f"/v1/tasks/{task_id}/attempts")).json["items"]
            assert {each["outcome"] for each in attempts[:-1]} == {"released"}
            assert (attempts[-1]["outcome"], attempts[-1]["number"]) == ("completed", 1)
    check_invariants(dsn)


async def test_a_holder_may_be_anything(serve: Serve, valkey: Valkey) -> None:
    with valkey.client() as redis:
        redis.set("officeplane:doclock:abc", b"\x00\xff" + b"x" * 5_000)
        async with sharing(serve, valkey) as served:
            client = served.client
            made = await create(client, documentId="abc")
            elsewhere = await create(client, documentId="other", priority="LOW")
            agent = await client.register()

            assert (await hold(client, agent))[0] == elsewhere["id"]
            reason = (await look(client, made["id"]))["blockedReason"]
            assert reason.startswith("Lock 'doc:abc' is held by another program (\\x00\\xffxxx")
            assert len(reason) < 300
            redis.delete("officeplane:doclock:abc")
            assert (await hold(client, agent))[0] == made["id"]


async def test_tasks_of_one_document_pass_the_lock_on(serve: Serve, valkey: Valkey) -> None:
    """The next one doesn't wait until the last one's lock is gone from Redis."""
    with valkey.client() as redis:
        async with sharing(serve, valkey) as served:
            client = served.client
            agent = await client.register()
            for _ in range(5):
                made = await create(client, documentId="abc")
                task_id, token = await client.hold(agent)
                assert task_id == made["id"] == holder(redis, "abc")
                await complete(client, task_id, token)


async def test_a_task_has_all_its_documents_or_none(serve: Serve, valkey: Valkey, dsn: str) -> None:
    """One of them is locked by another program: the task gives the other one back."""
    with valkey.client() as redis:
        program = Program(redis, "5a0c")
        assert program.lock("two")
        async with sharing(serve, valkey) as served:
            client = served.client
            task = await client.submit("code", lock_keys=["doc:one", "doc:two"], priority=1)
            last = await client.submit("code")
            agent = await client.register()
            assert (await hold(client, agent))[0] == last["id"]
            await until(lambda: holder(redis, "one") is None)
            program.unlock("two")
            task_id, token = await hold(client, agent)
            assert task_id == task["id"] == holder(redis, "one") == holder(redis, "two")
            await complete(client, task_id, token)
            await until(lambda: holder(redis, "one") is holder(redis, "two") is None)
    check_invariants(dsn)


async def test_readers_are_one_holder_to_others(serve: Serve, valkey: Valkey, dsn: str) -> None:
    """From the first to the last."""
    with valkey.client() as redis:
        async with sharing(serve, valkey) as served:
            client = served.client
            agent = await client.register(max_concurrent_tasks=5)
            for _ in range(2):
                await client.submit("code", lock_keys=[{"key": "doc:abc", "shared": True}])
            readers = [await hold(client, agent), await hold(client, agent)]
            first = readers[0][0]
            for reader in readers:
                assert holder(redis, "abc") == first
                assert not Program(redis, "other").lock("abc")
                await complete(client, *reader)
            await until(lambda: holder(redis, "abc") is None)
    check_invariants(dsn)


async def test_a_batch_holds_its_document_between_its_children(serve: Serve, valkey: Valkey) -> None:
    """R-196."""
    with valkey.client() as redis:
        async with sharing(serve, valkey) as served:
            client = served.client
            agent = await client.register()
            children = [{"taskType": "add_section"}, {"taskType": "write_page"}]
            batch = await create(client, documentId="abc", children=children)
            for _ in children:
                task_id, token = await client.hold(agent)
                assert holder(redis, "abc") == batch["id"]
                assert not Program(redis, "other").lock("abc")
                await complete(client, task_id, token)
            await until(lambda: holder(redis, "abc") is None)


@pytest.fixture
def shared(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> Valkey:
    """For processes that open the database with the settings of the environment."""
    monkeypatch.setenv("LINESHAFT_REDIS_URL", valkey.url)
    monkeypatch.setenv("LINESHAFT_OFFICEPLANE_LOCKS", "1")
    return valkey


@pytest.mark.parametrize("kind", ["database", "http", "exec"])
async def test_every_agent_works_under_the_lock(
    serve: Serve, shared: Valkey, dsn: str, kind: str, tmp_path: Path
) -> None:
    valkey = shared
    with valkey.client() as redis, commands_in(tmp_path) as commands:
        async with sharing(serve, valkey) as served:
            where = dsn if kind == "database" else f"http://127.0.0.1:{served.client.port}"
            async with Lineshaft(where) as shaft:
                agent = Agent("a")
                if kind == "exec":
                    port = valkey.url.rpartition(":")[2]
                    script = (
                        f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET officeplane:doclock:abc\\r\\n' >&3"
                    )
                    read = f'{script}; read -r _ <&3; read -r found <&3; printf %s "${{found%?}}"'
                    agent.task("edit")(commands.command("bash", "-c", read))
                else:

                    @agent.task("edit")
                    async def edit() -> str | None:
                        return holder(redis, "abc")

                task = await shaft.submit(NewTask("edit", lock_key="doc:abc"))
                await drain(shaft, agent)
                assert (await shaft.get(task)).result == task.id


async def test_a_lock_is_renewed_also_by_another_server(
    serve: Serve, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that took it may be gone: the agent goes on with another one."""
    monkeypatch.setattr(locks, "RENEW_EVERY_SEC", 0.02)
    monkeypatch.setattr(locks, "ADOPT_EVERY_SEC", 0.02)
    with valkey.client() as redis:
        async with sharing(serve, valkey) as first:
            made = await create(first.client, documentId="abc")
            await hold(first.client, await first.client.register())
        async with sharing(serve, valkey) as second:
            redis.expire("officeplane:doclock:abc", 300)
            await until(lambda: redis.ttl("officeplane:doclock:abc") > 590)
            assert holder(redis, "abc") == made["id"]
            await second.client.post(f"/api/tasks/{made['id']}/cancel")
            await until(lambda: holder(redis, "abc") is None)


async def test_without_redis_tasks_wait_and_then_run_under_the_own_lock(
    serve: Serve, valkey: Valkey, dsn: str
) -> None:
    """For a while another program may still hold a lock that Lineshaft can't read."""
    async with sharing(serve, valkey, officeplane_lock_grace_sec=1.0) as served:
        client = served.client
        agent = await client.register()
        valkey.kill()
        one, two = [await create(client, documentId="abc") for _ in range(2)]
        free = await create(client)

        assert await client.hold(agent) != one["id"]
        assert "redis is away" in (await look(client, one["id"]))["blockedReason"]
        task_id, token = await hold(client, agent)
        assert task_id in {one["id"], two["id"]}
        assert await client.claim(agent) == [], "Lineshaft's own lock holds"
        await complete(client, task_id, token)
        assert (await hold(client, agent))[0] != task_id
        assert (await look(client, free["id"]))["state"] == "RUNNING"
    check_invariants(dsn)


async def test_redis_comes_back_without_its_data(
    serve: Serve, valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """A running task takes its lock again; others wait: programs may work under locks that are lost."""
    async with sharing(serve, valkey, officeplane_lock_grace_sec=2.0) as served:
        client = served.client
        agent = await client.register()
        running = await create(client, documentId="abc")
        _, token = await hold(client, agent)
        valkey.kill()
        valkey.start()
        with valkey.client() as redis:
            await until(lambda: holder(redis, "abc") == running["id"])
            made = await create(client, documentId="other")
            assert await client.claim(agent) == []
            assert "has lost its data" in caplog.text
            assert (await hold(client, agent))[0] == made["id"] == holder(redis, "other")
            await complete(client, running["id"], token)
            await until(lambda: holder(redis, "abc") is None)


async def test_a_lock_that_is_lost_to_another_program_is_reported(
    serve: Serve, valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with sharing(serve, valkey) as served:
        client = served.client
        made = await create(client, documentId="abc")
        await hold(client, await client.register())
        with valkey.client() as redis:
            redis.set("officeplane:doclock:abc", "other")
            await until(lambda: "is locked by 'other'" in caplog.text)
            (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
            assert made["id"] in record.getMessage()
            assert holder(redis, "abc") == "other", "it is the other's now"


async def test_a_late_release_ends_no_later_grant(valkey: Valkey) -> None:
    """The same task again, claimed through another process."""
    client = RedisServer(valkey.url).connect("test")
    async with client:
        keys = LockKeys(client, "officeplane:")
        first, second = (Grant("abc", "task_1", token) for token in (1, 2))
        for grant in (first, second):
            assert (await keys.take(grant, new_data="d", known_data="")).outcome == "taken"
        await keys.release(first)
        assert await keys.holders(["abc"]) == {"abc": "task_1"}
        await keys.release(second)
        assert await keys.holders(["abc"]) == {"abc": None}


async def test_a_claim_that_lost_its_row_takes_nothing_from_the_next_one(valkey: Valkey) -> None:
    client = RedisServer(valkey.url).connect("test")
    async with client:
        keys = LockKeys(client, "officeplane:")
        await keys.take(Grant("abc", "task_2", 2), new_data="d", known_data="")
        late = await keys.take(Grant("abc", "task_1", 1), new_data="d", known_data="", former="task_2")
        assert (late.outcome, late.holder) == ("held", "task_2")


async def test_names_begin_with_the_prefix(serve: Serve, valkey: Valkey) -> None:
    async with sharing(serve, valkey, officeplane_prefix="office-2:") as served:
        made = await create(served.client, documentId="abc")
        await hold(served.client, await served.client.register())
        with valkey.client() as redis:
            assert redis.get("office-2:doclock:abc") == made["id"].encode()


async def test_closing_ends_although_a_cancellation_gets_lost(dsn: str, valkey: Valkey) -> None:
    """`wait_for` of Python 3.11 loses one that arrives together with what it waits for."""
    async with Database(dsn) as database:
        shared = locks.DocumentLocks(RedisServer(valkey.url), adopts=True)
        await shared.open(OutsideRows(database))
        await until(lambda: bool(shared._work._waiters))
        shared._work.set()
        async with asyncio.timeout(60):
            await shared.close()


def test_locks_need_a_redis() -> None:
    with pytest.raises(SettingsError, match="LINESHAFT_OFFICEPLANE_LOCKS needs LINESHAFT_REDIS_URL"):
        locks.of(Settings(officeplane_locks=True))
