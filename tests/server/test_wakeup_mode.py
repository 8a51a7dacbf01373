"""How agents are woken, and since when, as people see it."""

from collections.abc import Iterator

import pytest

from lineshaft.engine.feed.wakeups import Mode
from tests.server.conftest import Serve, until
from tests.valkey import Valkey, valkey_server


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with valkey_server() as server:
        yield server


async def test_the_mode_and_its_beginning_are_shown(serve: Serve, valkey: Valkey) -> None:
    async with serve(redis_url=valkey.url) as served:
        wakeups = served.service.wakeups
        client = served.client
        await until(lambda: wakeups.mode is Mode.REDIS)
        valkey.kill()
        await until(lambda: wakeups.mode is Mode.NOTIFY)

        since = wakeups.mode_since
        ready = (await client.get("/readyz")).json
        metrics = (await client.get("/metrics")).body.decode()
        page = (await client.get("/")).body.decode()

    assert (ready["wakeups"], ready["wakeup_mode"]) == (True, "notify")
    assert ready["wakeup_mode_since"].startswith(f"{since:%Y-%m-%dT%H:%M}")
    assert 'wakeup_mode{mode="notify"} 1' in metrics
    assert 'wakeup_mode{mode="redis"} 0' in metrics
    assert f"wakeup_mode_since_seconds {since.timestamp()}" in metrics
    assert "Wake-ups of agents: notify, since" in page
