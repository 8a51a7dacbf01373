"""The OpenAPI document and the metrics: what programs read about the server."""

import asyncio
import re
import shutil
from html import escape
from typing import Any

import pytest
from msgspec.inspect import EnumType, LiteralType, StructType

from lineshaft.clock import MovableClock
from lineshaft.model.open_enum import OpenEnum
from lineshaft.server.app import OPERATIONS
from lineshaft.types import Problem, SourceKind, Status
from tests.server.client import Client
from tests.server.conftest import Serve
from tests.wire_types import wire_types


def refs(node: Any) -> set[str]:
    if isinstance(node, dict):
        found = {node["$ref"]} if "$ref" in node else set()
        return found.union(*(refs(value) for value in node.values()))
    return set().union(*(refs(item) for item in node)) if isinstance(node, list) else set()


async def test_the_document_describes_every_operation(client: Client) -> None:
    document = (await client.get("/openapi.json")).json

    assert document["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {(o.method, re.sub(r":path\}", "}", o.path)) for o in OPERATIONS}
    names = set(document["components"]["schemas"])
    assert refs(document) <= {f"#/components/schemas/{name}" for name in names}
    assert not [name for name in names if "." in name], "no two of the same name"
    ids = [call["operationId"] for item in document["paths"].values() for call in item.values()]
    assert len(ids) == len(set(ids))


async def test_each_operation_tells_what_it_takes_and_answers(client: Client) -> None:
    document = (await client.get("/openapi.json")).json

    for operation in OPERATIONS:
        call = document["paths"][re.sub(r":path\}", "}", operation.path)][operation.method.lower()]
        assert call["summary"]
        assert any(status.startswith("2") for status in call["responses"])
        if operation.scope is not None:
            assert call["x-scope"] == operation.scope
            assert "401" in call["responses"]
        if operation.wire.body is not None:
            content = call["requestBody"]["content"]["application/json"]
            assert "schema" in content
            if call["requestBody"]["required"]:
                assert content["example"], operation.name
    task = document["components"]["schemas"]["Task"]["properties"]
    assert {"type": "number"} in task["max_cost_usd"]["anyOf"]
    query = document["paths"]["/v1/tasks"]["get"]["parameters"]
    assert {"status", "limit", "cursor", "order"} <= {parameter["name"] for parameter in query}


def test_answers_may_be_those_of_a_newer_server() -> None:
    """A closed enum, a literal or a struct that forbids unknown fields would make older clients fail."""
    answers = wire_types([Problem, *(kind for o in OPERATIONS for kind in o.answers.values())])

    enums = {part.cls for part in answers if isinstance(part, EnumType)}
    assert {kind for kind in enums if not issubclass(kind, OpenEnum)} == set()
    assert {part.values for part in answers if isinstance(part, LiteralType)} == set()
    structs = [part for part in answers if isinstance(part, StructType)]
    assert {part.cls for part in structs if part.forbid_unknown_fields} == set()


def test_requests_take_only_what_this_version_knows() -> None:
    """A decoder takes any text for an open enum, so a request with one has to be checked elsewhere."""
    #: `sources/definition.py` checks it, with a list of the allowed values.
    checked = {SourceKind}
    bodies = wire_types(kind for o in OPERATIONS for kind in (o.wire.body, o.wire.query))

    enums = {part.cls for part in bodies if isinstance(part, EnumType)}
    assert {kind for kind in enums if issubclass(kind, OpenEnum)} == checked
    structs = [part for part in bodies if isinstance(part, StructType)]
    assert {part.cls for part in structs if not part.forbid_unknown_fields} == set()


async def test_enums_of_answers_are_open_in_the_document(client: Client) -> None:
    schemas = (await client.get("/openapi.json")).json["components"]["schemas"]

    assert schemas["Status"]["type"] == "string"
    assert "enum" not in schemas["Status"]
    assert schemas["Status"]["x-extensible-enum"] == sorted(Status)


async def test_the_examples_of_the_document_work(client: Client) -> None:
    document = (await client.get("/openapi.json")).json

    for path in ("/v1/tasks", "/v1/tasks/batch", "/v1/dags", "/v1/agents"):
        example = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        reply = await client.post(path, example)
        assert reply.status == 201, (path, reply)


async def test_the_page_for_people_needs_nothing_from_elsewhere(client: Client) -> None:
    """Also without a network: no script, and a policy that would refuse one."""
    reply = await client.get("/docs")
    page = reply.body.decode()

    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page
    named = set(re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>]*)""", page))
    assert {name for name in named if not name.startswith("#")} == {"/openapi.json"}
    assert not re.findall(r"@import|url\(|//", re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL))
    document = (await client.get("/openapi.json")).json
    for path, item in document["paths"].items():
        for method, call in item.items():
            assert f"<b>{method.upper()}</b><code>{path}</code>" in page
            assert escape(call["summary"]) in page
    linked = set(re.findall(r'href="#(\w+)"', page))
    assert linked <= set(re.findall(r'<details id="(\w+)"', page))


METRICS = {
    "task_queue_depth": ("gauge", {"status", "priority_tier"}),
    "task_queue_wait_quantiles_seconds": ("summary", {"quantile"}),
    "task_queue_wait_seconds": ("untyped", {"quantile"}),
    "tasks_completed_total": ("counter", {"type"}),
    "tasks_failed_total": ("counter", {"reason"}),
    "tasks_dead_lettered_total": ("counter", set()),
    "tasks_duplicate_total": ("counter", set()),
    "task_cost_usd_total": ("counter", {"type", "agent", "model"}),
    "task_cost_usd": ("untyped", {"type", "agent", "model"}),
    "daily_spend_usd": ("gauge", set()),
    "artifact_store_bytes": ("gauge", set()),
    "artifact_store_contents": ("gauge", set()),
    "budget_remaining_usd": ("gauge", {"agent"}),
    "agent_utilization": ("gauge", {"agent_id"}),
    "agent_heartbeat_misses_total": ("counter", {"agent_id"}),
    "agent_claim_success_rate": ("gauge", {"agent_id"}),
    "source_firings_total": ("counter", {"source", "outcome"}),
    "source_lag_seconds": ("gauge", set()),
    "quota_running_tasks": ("gauge", {"quota"}),
    "quota_max_running_tasks": ("gauge", {"quota"}),
    "quota_waiting_tasks": ("gauge", {"quota"}),
    "quota_used": ("gauge", {"quota", "unit"}),
    "quota_rate_amount": ("gauge", {"quota", "unit"}),
    "totals_age_seconds": ("gauge", set()),
    "wakeup_mode": ("gauge", {"mode"}),
    "wakeup_mode_since_seconds": ("gauge", set()),
}


async def samples(client: Client) -> dict[str, float]:
    reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert kinds == {name: kind for name, (kind, _) in METRICS.items()}
    # What `promtool check metrics` says of names.
    for metric, (kind, known) in METRICS.items():
        assert kind != "counter" or metric.endswith("_total")
        assert "quantile" not in known or kind in {"summary", "untyped"}
    found = {}
    for line in lines:
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            found[sample] = float(value)
            name, _, labels = sample.partition("{")
            assert set(re.findall(r'(\w+)="', labels)) == METRICS[name][1]
    return found


async def test_metrics_have_the_names_of_004(serve: Serve, clock: MovableClock) -> None:
    """R-242. By a clock that the test moves: the money of a day is counted from midnight."""
    async with serve(clock=clock) as served:
        client = served.client
        agent = await client.register('odd "agent"\\', models_available=["large"], budget_usd=10)
        await client.submit("code", priority=50)
        task_id, token = await client.hold(agent | {"id": "odd%20%22agent%22%5C"})
        clock.advance(1)
        done = {"claim_token": token, "output": {"data": 1}, "cost_usd": 0.25}
        await client.post(f"/v1/tasks/{task_id}/complete", done)
        for category in ("timeout", "auth_failure", "my own"):
            await client.submit("code", max_attempts=1)
            task_id, token = await client.hold(agent | {"id": "odd%20%22agent%22%5C"})
            body = {"claim_token": token, "error": "x", "category": category, "cost_usd": 0.5}
            await client.post(f"/v1/tasks/{task_id}/fail", body)
        await client.submit("research", priority=50)

        found = await samples(client)

    me = 'agent_id="odd \\"agent\\"\\\\"'
    assert found['task_queue_depth{status="ready",priority_tier="normal"}'] == 1
    assert found['tasks_completed_total{type="code"}'] == 1
    assert found['tasks_failed_total{reason="timeout"}'] == 1
    assert found['tasks_failed_total{reason="other"}'] == 1
    assert found["tasks_dead_lettered_total"] == 3
    assert found[f'task_cost_usd{{type="code",{me.replace("agent_id", "agent")},model="large"}}'] == 1.75
    assert found["daily_spend_usd"] == 1.75
    assert found[f"budget_remaining_usd{{{me.replace('agent_id', 'agent')}}}"] == 8.25
    assert 0 < found[f"agent_utilization{{{me}}}"] <= 1
    assert found[f"agent_heartbeat_misses_total{{{me}}}"] == 0
    assert found[f"agent_claim_success_rate{{{me}}}"] == 0.25
    assert {f'task_queue_wait_quantiles_seconds{{quantile="{q}"}}' for q in (0.5, 0.95, 0.99)} <= found.keys()
    assert found["totals_age_seconds"] == 0
    assert {f'task_queue_wait_seconds{{quantile="{q}"}}' for q in ("p50", "p95", "p99")} <= found.keys()


async def test_metrics_please_prometheus(client: Client) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    agent = await client.register("a", budget_usd=10)
    await client.submit("code")
    task_id, token = await client.hold(agent)
    await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token, "cost_usd": 0.25})
    body = (await client.get("/metrics")).body

    checked = await asyncio.create_subprocess_exec(
        *(promtool, "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await checked.communicate(body)

    assert (checked.returncode, said.decode()) == (0, "")


async def test_totals_only_grow_and_are_the_same_everywhere(serve: Serve) -> None:
    async with serve() as one, serve() as two:
        agent = await one.client.register()
        for number in range(1, 4):
            await one.client.submit("code")
            task_id, token = await one.client.hold(agent)
            await two.client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": token})
            for client in (one.client, two.client):
                assert (await samples(client))['tasks_completed_total{type="code"}'] == number


async def test_metrics_of_quotas(client: Client) -> None:
    rate = {"amount": 10, "unit": "tasks", "per_sec": 3600}
    await client.put("/v1/quotas/coding", {"match": "type:code", "max_running": 3, "rate": rate})
    await client.submit("code")
    await client.claim(await client.register())

    found = await samples(client)

    assert found['quota_running_tasks{quota="coding"}'] == 1
    assert found['quota_max_running_tasks{quota="coding"}'] == 3
    assert found['quota_waiting_tasks{quota="coding"}'] == 0
    assert found['quota_used{quota="coding",unit="tasks"}'] == 1
    assert found['quota_rate_amount{quota="coding",unit="tasks"}'] == 10


async def test_metrics_of_an_empty_queue(client: Client) -> None:
    found = await samples(client)

    # The mode and its beginning are of the server, not of the queue: exactly one mode holds.
    of_server = {name: found.pop(name) for name in [*found] if name.startswith("wakeup_mode")}
    assert of_server.pop("wakeup_mode_since_seconds") > 0
    assert sum(of_server.values()) == 1
    assert found == {
        "tasks_dead_lettered_total": 0,
        "tasks_duplicate_total": 0,
        "daily_spend_usd": 0,
        "artifact_store_bytes": 0,
        "artifact_store_contents": 0,
        "source_lag_seconds": 0,
        "totals_age_seconds": 0,
    }
