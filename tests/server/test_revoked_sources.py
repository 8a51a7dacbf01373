"""What becomes of sources when the token that put them is revoked."""

import json
from typing import Any

import psycopg
import pytest

from lineshaft import Lineshaft, NewSource, SourceKind, SyncLineshaft
from lineshaft.cli.main import main
from tests.server.client import Client
from tests.server.conftest import Serve, Served

SCHEDULE: dict[str, Any] = {"kind": "schedule", "every_sec": 3600, "template": {"task": {"type": "x"}}}
EVENT: dict[str, Any] = {"kind": "event", "on": ["alert"], "template": {"task": {"type": "x"}}}


async def holder(served: Served, name: str, scope: str, agent_id: str | None = None) -> Client:
    made = await served.service.tokens.create(name, scope, agent_id=agent_id)
    return Client(served.client.port, made.token)


async def enabled(client: Client) -> dict[str, bool]:
    return {item["name"]: item["enabled"] for item in (await client.get("/v1/sources")).json["items"]}


async def test_sources_of_a_bound_token_pause_with_it(serve: Serve) -> None:
    async with serve(auth=True) as served:
        admin = await holder(served, "root", "admin")
        old = await holder(served, "old", "agent", agent_id="ann")
        new = await holder(served, "new", "agent", agent_id="ann")
        for name in ("agent:ann/daily", "agent:ann/moved"):
            assert (await old.put(f"/v1/sources/{name}", SCHEDULE)).status == 201
        # The agent has been started again with another token.
        assert (await new.put("/v1/sources/agent:ann/moved", SCHEDULE)).status == 200
        listed = {item["name"]: item["sources"] for item in (await admin.get("/v1/tokens")).json["items"]}
        assert listed == {"root": [], "old": ["agent:ann/daily"], "new": ["agent:ann/moved"]}

        assert (await admin.delete("/v1/tokens/old")).status == 204

        assert await enabled(admin) == {"agent:ann/daily": False, "agent:ann/moved": True}
        paused = (await admin.get("/v1/sources/agent:ann/daily")).json
        assert (paused["next_at"], paused["updated_by"]) == (None, "root")
        assert "its token was revoked" in paused["fault"]
        events = (await admin.get("/v1/events", kind="source.changed")).json["items"]
        assert [(event["data"]["source"], event["data"]["enabled"]) for event in events] == [
            ("agent:ann/daily", False)
        ]
        assert await served.service.engine.schedules.next_due_sec() is not None
        # Applying the same definition again doesn't end the pause; a person does.
        await new.put("/v1/sources/agent:ann/daily", SCHEDULE)
        assert not (await enabled(admin))["agent:ann/daily"]
        resumed = await admin.patch("/v1/sources/agent:ann/daily", {"enabled": True})
        assert (resumed.json["enabled"], resumed.json["fault"]) == (True, None)


async def test_sources_of_other_tokens_pause_if_asked_for(serve: Serve, dsn: str) -> None:
    async with serve(auth=True) as served, Lineshaft(dsn) as shaft:
        admin = await holder(served, "root", "admin")
        for name in ("one", "two", "three"):
            boss = await holder(served, name, "operate")
            await boss.put(f"/v1/sources/{name}-schedule", SCHEDULE)
            await boss.put(f"/v1/sources/{name}-event", EVENT)

        assert (await admin.delete("/v1/tokens/one")).status == 204
        assert (await admin.delete("/v1/tokens/two?pause_sources=true")).status == 204
        await shaft.revoke_token("three", pause_sources=True)

        assert {name for name, on in (await enabled(admin)).items() if on} == {"one-schedule", "one-event"}
        assert [source.name for source in await served.service.engine.event_sources.all()] == ["one-event"]
        assert (await admin.delete("/v1/tokens/root?pause_sources=maybe")).status == 422


@pytest.mark.parametrize("flag", [False, True])
def test_the_command_lists_them(
    flag: bool,
    dsn: str,
    connection: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    source = NewSource(name="weekly", kind=SourceKind.SCHEDULE, every_sec=60.0, template=SCHEDULE["template"])
    with SyncLineshaft(dsn) as shaft:
        boss = shaft.create_token("boss", "operate")
        shaft.sources.put(source)
        # As if it had been put over HTTP.
        connection.execute("UPDATE lineshaft.source SET token_id = %s", [boss.id])

        assert main(["token", "revoke", "boss", "--json", *(["--pause-sources"] if flag else [])]) == 0

        lists = {"sources_paused": ["weekly"] if flag else [], "sources_running": [] if flag else ["weekly"]}
        assert json.loads(capsys.readouterr().out) == {"revoked": [boss.id], **lists}
        assert shaft.sources.get("weekly").is_enabled is not flag
        assert main(["sources", "show", "weekly"]) == 0
        assert ("because its token was revoked" in capsys.readouterr().out) is flag
