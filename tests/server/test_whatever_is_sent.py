"""Requests that the OpenAPI document allows, and others that it doesn't.

No call may end in a server error, and each response must be one that the document describes. The calls are
made each time: a run that found something finds it again.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.result import Ok

from tests.server.client import Client
from tests.server.conftest import serving
from tests.server.test_operating import dead_letter

pytestmark = pytest.mark.slow("hundreds of generated requests")

T = TypeVar("T")

#: For each operation and each of the two ways.
EXAMPLES = 3
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


async def populate(client: Client) -> dict[str, list[str]]:
    """Names of things that are there, in as many states as is quickly done."""
    dead = await dead_letter(client, "dead")
    agent = await client.register("a1", models_available=["large"])
    await client.submit("held", lock_key="doc:1", max_cost_usd=1)
    held, token = await client.hold(agent, types=["held"])
    done = await client.submit("done")
    _, done_token = await client.hold(agent, types=["done"])
    await client.post(
        f"/v1/tasks/{done['id']}/complete", {"claim_token": done_token, "output": {"data": [1]}}
    )
    gated = await client.submit("gated", output={"validation": "human"})
    _, gated_token = await client.hold(agent, types=["gated"])
    await client.post(f"/v1/tasks/{gated['id']}/complete", {"claim_token": gated_token})
    # An output that stands for data, but isn't JSON.
    artifact = (await client.request("POST", "/v1/artifacts", raw=b"{not json")).json
    large = await client.submit("large")
    _, large_token = await client.hold(agent, types=["large"])
    await client.post(
        f"/v1/tasks/{large['id']}/complete",
        {"claim_token": large_token, "output": {"data_ref": artifact["ref"]}},
    )
    batch = await client.post(
        "/api/tasks", {"taskType": "b", "documentId": "2", "children": [{"taskType": "c"}]}
    )
    ready = await client.submit("ready")
    dag = await client.post("/v1/dags", {"title": "d", "tasks": [{"type": "x", "key": "k"}, {"type": "y"}]})
    tasks = [dead, held, done["id"], gated["id"], batch.json["id"], ready["id"]]
    return {
        "id": [*tasks, large["id"], artifact["id"], "a1", dag.json["dag"]["id"]],
        "key": ["doc:1", "dead", "model:large", "*"],
        "claim_token": [token, done_token],
        "name": ["step one/two"],
    }


@contextmanager
def in_a_thread(dsn: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The server in a loop of its own: the calls are made one by one, by a program without one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    server = serving(dsn)
    try:
        served = run(server.__aenter__())
        try:
            yield f"http://127.0.0.1:{served.client.port}", run(populate(served.client))
        finally:
            run(server.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_no_call_ends_in_a_server_error(dsn: str) -> None:
    with in_a_thread(dsn) as (url, names):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        called = 0
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), found
            call_it(found.ok(), url, names)
            called += 1
        assert called > 60


def call_it(
    operation: Any,
    url: str,
    names: dict[str, list[str]],
    *,
    examples: int = EXAMPLES,
    headers: dict[str, str] | None = None,
) -> None:
    """With bodies and parameters that fit the document and with others; at things that are there, and not."""
    cases = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )
    if "/steps/" not in operation.path:
        # Only names of steps have slashes.
        names = {name: some for name, some in names.items() if name != "name"}
    known = st.fixed_dictionaries({name: st.sampled_from([None, *some]) for name, some in names.items()})

    @settings(
        max_examples=2 * examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, names=known)
    def call(case: Any, names: dict[str, str | None]) -> None:
        for place in (case.path_parameters, case.body):
            if isinstance(place, dict):
                place |= {name: value for name, value in names.items() if name in place and value is not None}
                if "wait_sec" in place:
                    # Nobody waits here.
                    place["wait_sec"] = 0
        response = case.call(base_url=url, headers=headers)
        case.validate_response(response, checks=CHECKS)

    call()
