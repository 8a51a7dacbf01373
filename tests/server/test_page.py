"""The examples of docs/http.md, run as they stand there."""

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from lineshaft.server.app import OPERATIONS
from lineshaft.server.framework.problems import STATUSES
from tests.server.client import Client
from tests.server.test_openapi import METRICS

PAGE = (Path(__file__).parents[2] / "docs/http.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number])


async def run(*command: str, **variables: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_agent_without_a_library(client: Client) -> None:
    task = await client.submit("research", spec={"prompt": "competitors"})

    await run(sys.executable, "-c", block("python"), LINESHAFT_URL=f"http://127.0.0.1:{client.port}")

    done = await client.task(task["id"])
    assert (done["status"], done["output"]["data"]) == ("COMPLETED", {"summary": "COMPETITORS"})
    assert done["cost_usd"] == 0.01


async def test_from_python(client: Client) -> None:
    out = await run(sys.executable, "-c", block("python", 1), LINESHAFT_URL=f"http://127.0.0.1:{client.port}")

    assert out == "{'draft': 'A page about line shafts'}\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
async def test_the_first_calls(client: Client) -> None:
    script = block("sh").replace("http://127.0.0.1:8001", f"http://127.0.0.1:{client.port}")

    out = await run("bash", "-e", "-c", script)

    assert "problem" not in out
    assert (await client.get("/v1/stats")).json["by_status"] == {"PENDING": 1, "READY": 3}


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
async def test_batches_of_work(client: Client) -> None:
    await client.submit()

    out = await run("bash", "-e", "-c", block("sh", 1), URL=f"http://127.0.0.1:{client.port}")

    assert '"status":"RUNNING"' in out
    assert '"code":"not_found"' in out, "the last call completes a task that doesn't exist"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
async def test_the_calls_of_officeplane(client: Client) -> None:
    out = await run("bash", "-e", "-c", block("sh", 2), URL=f"http://127.0.0.1:{client.port}")

    assert "detail" not in out
    assert '"maxRetries":3' in out
    assert out.endswith("[]"), "nothing runs yet"


def test_every_code_and_metric_is_described() -> None:
    described = set(re.findall(r"`([a-z_]+)`", PAGE))

    assert set(STATUSES) - {"internal"} <= described
    assert set(METRICS) <= described


def test_every_route_is_listed_with_its_scope() -> None:
    """All that read only are summed up in one line."""
    lines = re.findall(r"^\| `?(\w+)`? \| [^|]*\| ([^|]*`[^|]*) \|$", PAGE, re.MULTILINE)
    listed = {scope: set(re.findall(r"`([^`]+)`", routes)) for scope, routes in lines}
    for operation in OPERATIONS:
        scope = "none" if operation.scope is None else str(operation.scope)
        path = operation.path.replace(":path", "")
        if scope == "read" and operation.method == "GET" and path != "/metrics":
            continue
        if path.startswith("/v1/work/") and operation.method == "POST":
            path = "/v1/work/…"
        tail = re.search(r"/(?:steps/)?[^/]+$", path)
        short = f"…{tail[0]}" if tail else path
        assert {f"{operation.method} {path}", short} & listed[scope], operation.name
