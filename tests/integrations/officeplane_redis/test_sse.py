"""Progress for OfficePlane's pages: published once, in order, whichever agent reports it."""

import json
from typing import Any

import pytest
from redis.client import PubSub

from lineshaft.duties.supervisor import all_duties
from lineshaft.errors import SettingsError
from lineshaft.integrations.officeplane_redis.sse import SsePublisher
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.settings import Settings
from tests.integrations.officeplane.calls import create, fail
from tests.server.conftest import Served
from tests.valkey import Valkey


def messages(listening: PubSub) -> list[tuple[str, dict[str, Any]]]:
    found = []
    while (message := listening.get_message(timeout=0)) is not None:
        found.append((message["channel"].decode(), json.loads(message["data"])))
    return found


async def test_progress_is_published_once_by_several_servers(served: Served, valkey: Valkey) -> None:
    client = served.client
    with valkey.client() as redis, redis.pubsub() as listening:  # type: ignore[no-untyped-call]
        listening.psubscribe("officeplane:sse:*")
        assert (listening.get_message(timeout=60) or {})["type"] == "psubscribe"
        server = RedisServer(valkey.url, timeout_sec=60)
        publishers = [SsePublisher(served.service.events, server) for _ in range(2)]
        for publisher in publishers:
            await publisher.run_once()
        agent = await client.register()
        made = await create(client, taskName="Page three", maxRetries=0)
        task_id, token = await client.hold(agent)
        for progress in ("half", {"done": 1}):
            beat = {"id": task_id, "claim_token": token, "progress": progress}
            body = {"incarnation": agent["incarnation"], "tasks": [beat]}
            assert (await client.post(f"/v1/agents/{agent['id']}/heartbeat", body)).status == 200
        await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})
        failed = await create(client, maxRetries=0)
        await fail(client, agent)
        cancelled = await create(client)
        await client.post(f"/api/tasks/{cancelled['id']}/cancel", {"reason": "not needed"})
        for publisher in publishers:
            await publisher.run_once()

        about = {"task_id": made["id"]}
        start = about | {"task_type": "edit", "title": "Page three"}
        found = messages(listening)
        assert [message for channel, message in found if channel == f"officeplane:sse:{made['id']}"] == [
            {"event": "start", "data": start},
            {"event": "delta", "data": {"content": "half"}},
            {"event": "delta", "data": {"done": 1}},
            {"event": "stop", "data": about},
        ]
        ends = [
            (channel, message["data"]["message"]) for channel, message in found if message["event"] == "error"
        ]
        assert ends == [
            (f"officeplane:sse:{failed['id']}", "failed: it broke"),
            (f"officeplane:sse:{cancelled['id']}", "cancelled: not needed"),
        ]


async def test_a_server_publishes_if_it_is_switched_on(served: Served) -> None:
    def publishes(**settings: Any) -> bool:
        duties = all_duties(served.service.engine, Settings(**settings))
        return any(isinstance(duty, SsePublisher) for duty in duties)

    assert publishes(officeplane_sse=True, redis_url="redis://127.0.0.1:1")
    assert not publishes(redis_url="redis://127.0.0.1:1")
    with pytest.raises(SettingsError, match="LINESHAFT_OFFICEPLANE_SSE needs LINESHAFT_REDIS_URL"):
        publishes(officeplane_sse=True)
