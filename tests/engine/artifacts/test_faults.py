"""A store that refuses, hangs or dies, and an uploader that is killed: no half artifact is ever visible."""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, RetrySpec, Status, TaskContext
from lineshaft.artifacts.s3 import S3Store
from lineshaft.artifacts.store import Store, StoreUnavailableError
from lineshaft.clock import MovableClock
from lineshaft.engine.artifacts.artifacts import CUT_OFF_SEC
from lineshaft.engine.engine import Engine
from tests.artifact_stores import BUCKET, use_s3
from tests.engine.artifacts.helpers import content, count, is_stored, pieces, put
from tests.proxy import Proxy, proxied_url

LARGE = os.urandom(12 << 20)


@asynccontextmanager
async def _through_proxy(
    dsn: str, clock: MovableClock, s3_url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Engine, Proxy]]:
    async with proxied_url(s3_url) as (url, proxy):
        use_s3(monkeypatch, url)
        prefix = place.removeprefix(f"s3://{BUCKET}/")
        async with Engine(dsn, clock=clock, store=S3Store(BUCKET, prefix, retries=0)) as engine:
            yield engine, proxy


async def test_s3_refuses_hangs_and_dies(  # noqa: PLR0917 - fixtures
    dsn: str,
    clock: MovableClock,
    s3_url: str,
    s3_place: str,
    monkeypatch: pytest.MonkeyPatch,
    connection: psycopg.Connection,
) -> None:
    async with _through_proxy(dsn, clock, s3_url, s3_place, monkeypatch) as (engine, proxy):
        kept = await put(engine, b"kept")

        proxy.cut()
        for data in (b"small", LARGE):
            with pytest.raises(StoreUnavailableError, match=s3_place):
                await put(engine, data)
        with pytest.raises(StoreUnavailableError):
            await content(engine, kept)
        proxy.restore()

        proxy.hold()
        patient = engine.artifacts._given_store
        engine.artifacts._given_store = S3Store(
            BUCKET, s3_place.removeprefix(f"s3://{BUCKET}/"), request_sec=1.0, retries=0
        )
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await put(engine, LARGE)
        assert time.monotonic() - began < 30
        engine.artifacts._given_store = patient
        proxy.restore()

        async def dying() -> AsyncIterator[bytes]:
            async for piece in pieces(LARGE):
                yield piece
            proxy.cut()

        with pytest.raises(StoreUnavailableError):
            await engine.artifacts.put(dying(), name="dying")
        assert count(connection, "artifact") == 1

        # An artifact can be deleted; the janitor deletes its content when the store is back.
        await engine.artifacts.delete(kept.ref)
        with pytest.raises(StoreUnavailableError):
            await engine.artifacts.clean_up(older_than_sec=1, limit=10)
        proxy.restore()
        clock.advance(CUT_OFF_SEC + 1)
        await engine.artifacts.clean_up(older_than_sec=1, limit=10)
        assert count(connection, "content") == 0
        assert not await is_stored(engine.artifacts._store, kept)

        made = await put(engine, LARGE)
        assert await content(engine, made) == LARGE


async def test_a_task_is_retried_while_the_store_is_away(
    dsn: str, s3_url: str, s3_place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied_url(s3_url) as (url, proxy):
        use_s3(monkeypatch, url)
        monkeypatch.setenv("LINESHAFT_ARTIFACTS", s3_place)
        agent = Agent("writer")

        @agent.task("write")
        async def write(ctx: TaskContext) -> None:
            if ctx.attempt == 1:
                proxy.cut()
            else:
                proxy.restore()
            await ctx.put_artifact("report.txt", b"a report")

        async with Lineshaft(dsn) as shaft:
            retry = RetrySpec(initial_delay_sec=0, jitter=False)
            handle = await shaft.submit(NewTask("write", retry=retry, max_attempts=2))
            await agent.run(shaft, until_idle=True)
            task = await handle.task()

    assert task.status is Status.COMPLETED, task.failure_history
    assert f"The artifact store, {s3_place}, doesn't answer" in str(task.failure_history[0].error)


_UPLOAD = """
import asyncio, os, sys
from lineshaft.artifacts import open_store
from lineshaft.engine.engine import Engine
from lineshaft.settings import Settings

async def endless():
    for n in range(40):
        yield os.urandom(1 << 20)
    print("halfway", flush=True)
    await asyncio.sleep(600)

async def main():
    async with Engine(sys.argv[1], store=open_store(Settings(artifacts=sys.argv[2]))) as engine:
        await engine.artifacts.put(endless(), name="lost")

asyncio.run(main())
"""


@pytest.mark.slow("starts and kills processes")
async def test_an_uploader_that_is_killed_leaves_nothing_visible(
    dsn: str, engine: Engine, store: Store, place: str, connection: psycopg.Connection
) -> None:
    await engine.artifacts.check_store()
    arguments = [sys.executable, "-c", _UPLOAD, dsn, place]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as uploader:  # noqa: ASYNC220 - it is killed
        assert uploader.stdout is not None
        line = uploader.stdout.readline()
        uploader.kill()
    assert line == b"halfway\n"

    assert count(connection, "artifact") == count(connection, "content") == 0
    assert await store.is_empty()
    left = await store.old_temporary(timedelta(days=-1))
    if place.startswith("s3:"):
        assert left == []  # parts of an upload that never ended are not an object
        return
    (key,) = left
    assert (await engine.artifacts.clean_up(older_than_sec=1, limit=10))["temporary files deleted"] == 0
    two_days_ago = time.time() - 2 * 86_400
    os.utime(Path(place) / key, (two_days_ago, two_days_ago))
    assert (await engine.artifacts.clean_up(older_than_sec=1, limit=10))["temporary files deleted"] == 1
    assert await store.old_temporary(timedelta(days=-1)) == []
