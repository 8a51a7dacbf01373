"""`/v1/sources`: the resource, its scopes, its errors, and its file."""

from pathlib import Path
from typing import Any

import pytest

from lineshaft.errors import SettingsError
from tests.server.client import Client
from tests.server.conftest import Serve, Served

SCHEDULE = {
    "kind": "schedule",
    "cron": "0 9 * * MON",
    "timezone": "Europe/Berlin",
    "template": {"task": {"type": "report", "title": "Week of ${event.tick}"}},
}
HOOK: dict[str, Any] = {
    "kind": "webhook",
    "verify": {"scheme": "github", "secret_env": "LINESHAFT_HOOK_SECRET"},
    "template": {"goal": "Look at ${event.title}"},
}


async def test_a_source_over_http(client: Client) -> None:
    made = await client.post("/v1/sources", {"name": "weekly", **SCHEDULE})
    assert made.status == 201
    found = made.json
    assert {name: found[name] for name in ("name", "kind", "cron", "timezone", "catch_up", "enabled")} == {
        "name": "weekly",
        "kind": "schedule",
        "cron": "0 9 * * MON",
        "timezone": "Europe/Berlin",
        "catch_up": "one",
        "enabled": True,
    }
    assert found["next_at"].endswith("Z")
    assert (found["last_fired_at"], found["last_outcome"], found["open_tasks"]) == (None, None, 0)
    assert "verify" not in found
    assert (await client.post("/v1/sources", {"name": "weekly", **SCHEDULE})).code == "already_exists"
    assert (await client.put("/v1/sources/weekly", SCHEDULE)).status == 200
    assert (await client.put("/v1/sources/hook", {"name": "hook", **HOOK})).status == 201
    assert (await client.put("/v1/sources/hook", {"name": "other", **HOOK})).code == "invalid_input"

    changed = await client.request("PATCH", "/v1/sources/weekly", {"enabled": False, "max_open": 2})
    assert (changed.json["enabled"], changed.json["max_open"], changed.json["next_at"]) == (False, 2, None)
    assert [item["name"] for item in (await client.get("/v1/sources")).json["items"]] == ["hook", "weekly"]
    assert [item["name"] for item in (await client.get("/v1/sources", kind="webhook")).json["items"]] == [
        "hook"
    ]
    assert (await client.request("DELETE", "/v1/sources/weekly")).status == 204
    assert (await client.get("/v1/sources/weekly")).code == "not_found"


async def test_firing_by_hand(client: Client) -> None:
    await client.put("/v1/sources/hook", HOOK)

    dry = await client.post("/v1/sources/hook/fire", {"event": {"title": "x"}, "dry_run": True})
    real = await client.post("/v1/sources/hook/fire", {"event": {"title": "x"}})
    failed = await client.post("/v1/sources/hook/fire", {"event": {"title": "y" * 1000 + "\0"}})

    assert dry.json == {
        "tasks": [
            {
                "type": "goal",
                "title": "Look at x",
                "spec": {"goal": "Look at x"},
                "tags": [],
                "created_by": "event:hook",
            }
        ]
    }
    assert real.json["outcome"] == "created"
    task = (await client.get(f"/v1/tasks/{real.json['task_ids'][0]}")).json
    assert (task["type"], task["created_by"], task["spec"]) == ("goal", "event:hook", {"goal": "Look at x"})
    assert failed.json["outcome"] == "failed"
    firings = (await client.get("/v1/sources/hook/firings")).json["items"]
    assert [item["outcome"] for item in firings] == ["failed", "created"]
    assert set(firings[0]) == {"at", "outcome", "task_ids", "dag_id", "error"}
    assert (await client.get("/v1/sources/hook")).json["last_outcome"] == "failed"
    metrics = (await client.get("/metrics")).body.decode()
    assert 'source_firings_total{source="hook",outcome="created"} 1' in metrics
    assert "source_lag_seconds 0.0" in metrics


@pytest.mark.parametrize(
    ("change", "place", "message"),
    [
        ({"cron": "0 9 * *"}, "cron", "must have five fields"),
        ({"timezone": "Mars/Base"}, "timezone", "unknown time zone 'Mars/Base'"),
        ({"when": "event.[a"}, "when", "column 9"),
        ({"template": {"task": {"type": "${event.}"}}}, "template.task.type", "column 7: the expression is"),
        ({"template": {"tsk": {}}}, "template", "must have one of task, dag and goal"),
        ({"verify": {"scheme": "none"}}, "verify", "not a field of sources of kind schedule"),
        ({"cronn": "x"}, "cronn", "unknown field"),
        ({"kind": "nope"}, "kind", "nope"),
    ],
)
async def test_an_invalid_definition_is_422_with_field_and_place(
    client: Client, change: dict[str, Any], place: str, message: str
) -> None:
    refused = await client.put("/v1/sources/s", {**SCHEDULE, **change})

    assert (refused.status, refused.code) == (422, "invalid_input")
    (fault,) = refused.json["errors"]
    assert fault["loc"] == place
    assert message in fault["msg"]
    assert (await client.get("/v1/sources")).json["items"] == []


async def test_scopes(serve: Serve) -> None:
    async with serve(auth=True) as served:
        tokens = served.service.tokens
        bound = await tokens.create("bound", "agent", agent_id="a/1")
        found = {scope: await tokens.create(scope, scope) for scope in ("read", "agent", "operate", "admin")}
        reader, agent, operator, admin = (
            Client(served.client.port, found[scope].token) for scope in ("read", "agent", "operate", "admin")
        )
        own = Client(served.client.port, bound.token)
        daily = {**SCHEDULE, "cron": "@daily"}

        assert (await reader.put("/v1/sources/s", SCHEDULE)).code == "forbidden"
        assert (await agent.put("/v1/sources/s", SCHEDULE)).code == "forbidden"
        assert (await operator.put("/v1/sources/s", SCHEDULE)).status == 201
        assert (await reader.get("/v1/sources/s")).status == 200
        assert (await agent.post("/v1/sources/s/fire")).code == "forbidden"
        # An agent declares its own schedules.
        assert (await own.put("/v1/sources/agent:a%2F1%2Fdaily", daily)).status == 201
        assert (await own.put("/v1/sources/agent:b/daily", daily)).code == "forbidden"
        assert (await agent.put("/v1/sources/agent:b/daily", daily)).status == 201
        assert (await reader.get("/v1/sources/agent:a%2F1%2Fdaily")).json["origin"] == "agent"
        # A webhook that anybody may call.
        anyone = {**HOOK, "verify": {"scheme": "none"}}
        applied = {"origin": "file:f.yaml", "sources": [{"name": "x", **anyone}]}
        assert (await operator.put("/v1/sources/h", anyone)).code == "forbidden"
        assert (await operator.post("/v1/sources/apply", applied)).code == "forbidden"
        assert (await operator.put("/v1/sources/h", HOOK)).status == 201
        change = {"verify": {"scheme": "none"}}
        assert (await operator.request("PATCH", "/v1/sources/h", change)).code == "forbidden"
        assert (await admin.put("/v1/sources/h", anyone)).status == 200
        (event,) = (await reader.get("/v1/events", kind="source.deleted")).json["items"] or [None]
        assert event is None


async def test_a_server_applies_its_file_when_it_starts(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "sources.yaml"
    weekly = "{kind: schedule, name: weekly, cron: '0 9 * * MON', template: {task: {type: report}}}"
    file.write_text(f"sources:\n  - {weekly}\n")
    async with serve(sources=file) as served:
        first = (await served.client.get("/v1/sources/weekly")).json
        assert first["origin"] == "file:sources.yaml"
        await served.client.request("PATCH", "/v1/sources/weekly", {"enabled": False})
        await served.client.put("/v1/sources/by-hand", SCHEDULE)
    async with serve(sources=file) as served:
        assert not (await served.client.get("/v1/sources/weekly")).json["enabled"]
    file.write_text("sources: []\n")
    async with serve(sources=file) as served:
        assert [each["name"] for each in (await served.client.get("/v1/sources")).json["items"]] == [
            "by-hand"
        ]
    file.write_text("sources: [{name: x, kind: schedule, cron: nope, template: {goal: x}}]\n")
    with pytest.raises(SettingsError, match=r"LINESHAFT_SOURCES .*sources\[0\]\.cron: must have five fields"):
        async with serve(sources=file):
            pass


async def test_differences_are_shown_before_they_are_applied(served: Served) -> None:
    body = {"origin": "file:f.yaml", "sources": [{"name": "a", **SCHEDULE}]}
    plan = await served.client.post("/v1/sources/apply", {**body, "dry_run": True})
    assert plan.json == {"items": [{"name": "a", "change": "create", "fields": {}}]}
    assert (await served.client.get("/v1/sources")).json["items"] == []
    assert (await served.client.post("/v1/sources/apply", body)).json == plan.json
    body["sources"][0] = {"name": "a", **SCHEDULE, "max_open": 1}  # type: ignore[index]
    changed = await served.client.post("/v1/sources/apply", body)
    assert changed.json == {"items": [{"name": "a", "change": "change", "fields": {"max_open": [None, 1]}}]}
