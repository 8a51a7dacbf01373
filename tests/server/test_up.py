"""`lineshaft up` and `lineshaft token`, as processes of their own, with the embedded database."""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.client import Client
from tests.server.conftest import until


class Process:
    def __init__(self, process: asyncio.subprocess.Process, report: dict[str, Any]) -> None:
        self.process = process
        self.report = report
        self.client = Client(int(report["url"].rpartition(":")[2]))

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Exit code, and what it said since it was ready."""
        self.process.send_signal(number)
        out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


Up = Callable[..., AbstractAsyncContextManager[Process]]
Run = Callable[..., Any]


def environment(variables: dict[str, str]) -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith("LINESHAFT_")} | variables


@pytest.fixture
def run(tmp_path: Path) -> Run:
    async def call(*arguments: str, **variables: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lineshaft.cli.main", *arguments),
            cwd=tmp_path,
            env=environment(variables),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    return call


@pytest.fixture
def up(tmp_path: Path) -> Up:
    @asynccontextmanager
    async def start(*arguments: str, **variables: str) -> AsyncIterator[Process]:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "lineshaft.cli.main",
                "up",
                "--json",
                "--port",
                "0",
                *arguments,
            ),
            cwd=tmp_path,
            env=environment(variables),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        said = b""
        while not said.endswith(b"\n}\n"):
            line = await process.stdout.readline()
            assert line, (await process.communicate(), said)
            said += line
        try:
            yield Process(process, json.loads(said))
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    return start


@pytest.mark.slow("initdb, and two starts of the server")
async def test_from_nothing_to_a_queue_that_works(up: Up, tmp_path: Path) -> None:
    """R-243."""
    async with up() as server:
        assert server.report["database"]["home"] == str(tmp_path / ".lineshaft")
        assert server.report["migrations_applied"]
        assert {"reaper", "promoter"} <= set(server.report["duties"])
        client = server.client
        await client.submit(retry={"strategy": "fixed", "initial_delay_sec": 0.05, "jitter": False})
        agent = await client.register()
        task_id, token = await client.hold(agent)
        await client.post(f"/v1/tasks/{task_id}/fail", {"claim_token": token, "error": "boom"})

        # The promoter of this process makes it READY again.
        (item,) = await client.claim(agent, wait_sec=60)
        await client.post(f"/v1/tasks/{task_id}/start", {"claim_token": item["claim_token"]})
        done = await client.post(f"/v1/tasks/{task_id}/complete", {"claim_token": item["claim_token"]})
        assert done.json["status"] == "COMPLETED"

        code, out, err = await server.stop()
        assert (code, out) == (0, "")
        lines = [json.loads(line) for line in err.splitlines()]
        completed = next(line for line in lines if line.get("path", "").endswith("/complete"))
        assert completed["request_id"]
        assert (completed["task_id"], completed["status"]) == (task_id, 200)
        assert token not in err

    async with up("--no-duties") as again:
        assert again.report["migrations_applied"] == []
        assert again.report["duties"] == []
        assert (await again.client.task(task_id))["status"] == "COMPLETED"


@pytest.mark.slow("initdb, and two servers")
async def test_two_of_them_on_one_home(up: Up) -> None:
    async with up() as one, up() as two:
        assert one.report["url"] != two.report["url"]
        agent = await one.client.register()
        waiter = asyncio.create_task(one.client.claim(agent, wait_sec=60))

        task = await two.client.submit()

        assert [item["task"]["id"] for item in await waiter] == [task["id"]]
        assert (await one.stop(signal.SIGINT))[0] == 0
        assert (await two.client.task(task["id"]))["status"] == "CLAIMED", "the other goes on"


@pytest.mark.slow("starts servers")
async def test_a_given_database_with_people_watching(up: Up, empty_dsn: str) -> None:
    """It is migrated, and streams and waiting claims don't keep the server from stopping."""
    async with up(LINESHAFT_DATABASE_URL=empty_dsn) as server:
        assert server.report["database"] == {"kind": "configured"}
        agent = await server.client.register()
        async with server.client.stream() as stream:
            with psycopg.connect(empty_dsn, autocommit=True) as connection:
                # Once the server has the claim, it is a new sign of life.
                before = connection.execute(
                    "UPDATE lineshaft.instance SET last_heartbeat = last_heartbeat - interval '30 seconds'"
                    " RETURNING last_heartbeat"
                ).fetchone()
                waiter = asyncio.create_task(server.client.claim(agent, wait_sec=60))
                seen = b"SELECT last_heartbeat FROM lineshaft.instance"
                await until(lambda: connection.execute(seen).fetchone() != before)

            code, _, err = await server.stop()

            assert code == 0
            assert "timeout graceful shutdown exceeded" not in err
            assert await waiter == []
            # It may still get the event of the registration.
            assert {event["event"] for event in await stream.rest()} <= {"agent.registered"}


@pytest.mark.slow("starts servers")
async def test_a_port_that_is_taken(run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        code, _, err = await run("up", "--port", str(port))

    assert code == 1
    assert f"Can't listen on 127.0.0.1 port {port}" in err
    assert "--port" in err
    assert "Traceback" not in err
    assert not (tmp_path / ".lineshaft").exists(), "nothing was started"

    code, _, err = await run("up", "--host", "nowhere.invalid", "--port", "0")
    assert (code, "Can't listen on nowhere.invalid" in err) == (1, True)
    assert "Check --host" in err


@pytest.mark.slow("starts four servers")
async def test_tokens_and_exposure(up: Up, run: Run, dsn: str, connection: psycopg.Connection) -> None:
    url = {"LINESHAFT_DATABASE_URL": dsn}
    code, _, err = await run("up", "--host", "0.0.0.0", "--port", "0", **url)  # noqa: S104 - refused
    assert code == 1
    assert "lineshaft token create" in err

    code, out, _ = await run("token", "create", "--name", "ci", "--scope", "submit", "--json", **url)
    made = json.loads(out)
    assert code == 0
    assert set(made) == {"id", "name", "scope", "token"}
    code, out, _ = await run("token", "list", **url)
    assert made["id"] in out
    assert made["token"] not in out
    assert connection.execute("SELECT name, scope FROM lineshaft.token").fetchall() == [("ci", "submit")]

    async with up("--host", "0.0.0.0", **url) as server:  # noqa: S104 - only this test calls
        assert server.report["tokens_required"] is True
        assert (await server.client.get("/v1/tasks")).status == 401
        assert (await server.client.get("/healthz")).status == 200
        server.client.token = made["token"]
        assert (await server.client.post("/v1/tasks", {"type": "x"})).status == 201
        assert (await server.client.post("/v1/pause")).status == 403
        code, out, _ = await run("token", "revoke", "ci", "--json", **url)
        assert json.loads(out) == {"revoked": [made["id"]], "sources_paused": [], "sources_running": []}
        assert (await server.client.get("/v1/tasks")).status == 401
        code, _, err = await server.stop()
        assert code == 0
        assert made["token"] not in err

    code, _, err = await run("token", "revoke", "unknown", **url)
    assert code == 1
    assert "unknown" in err
    assert (await run("token", "create", "--name", "x", "--scope", "root", **url))[0] == 2


@pytest.mark.slow("starts a server")
async def test_tokens_can_be_required_everywhere(up: Up, dsn: str) -> None:
    async with up(LINESHAFT_DATABASE_URL=dsn, LINESHAFT_AUTH="required") as server:
        assert (await server.client.get("/v1/tasks")).code == "unauthorized"


@pytest.mark.slow("starts servers")
async def test_tokens_can_be_lifted_on_loopback_only(up: Up, run: Run, dsn: str) -> None:
    variables = {"LINESHAFT_DATABASE_URL": dsn, "LINESHAFT_AUTH": "off"}
    assert (await run("token", "create", "--name", "ci", "--scope", "submit", **variables))[0] == 0

    async with up(**variables) as server:
        assert server.report["tokens_required"] is False
        assert (await server.client.get("/v1/tasks")).status == 200
        _, _, err = await server.stop()
    code, _, refused = await run("up", "--host", "0.0.0.0", "--port", "0", **variables)  # noqa: S104 - refused

    assert "LINESHAFT_AUTH=off: no call needs a token" in err
    assert (code, "LINESHAFT_AUTH=off" in refused) == (1, True)


@pytest.mark.slow("starts a server")
async def test_it_says_what_it_did_and_where_things_are(tmp_path: Path, dsn: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft.cli.main", "up", "--port", "0"),
        cwd=tmp_path,
        env=environment({"LINESHAFT_DATABASE_URL": dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    said = ""
    while "Stop" not in said:
        line = await process.stdout.readline()
        assert line, (await process.communicate(), said)
        said += line.decode()
    process.terminate()
    await process.communicate()

    assert process.returncode == 0
    assert "http://127.0.0.1:" in said
    assert "up to date" in said
    assert "reaper" in said
    assert "programs of this account may call everything" in said


@pytest.mark.slow("starts servers")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere limits of others can't be read")
async def test_it_takes_as_many_connections_as_the_account_may_have(tmp_path: Path, dsn: str) -> None:
    """Each agent that waits is an open file; a shell's usual limit is 1024."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'ulimit -Sn 200 && exec "$@"', "sh"),
        *(sys.executable, "-m", "lineshaft.cli.main", "up", "--json", "--port", "0"),
        cwd=tmp_path,
        env=environment({"LINESHAFT_DATABASE_URL": dsn}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    await process.stdout.readuntil(b"\n}\n")
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    process.terminate()
    await process.communicate()

    assert soft == hard
    assert process.returncode == 0
