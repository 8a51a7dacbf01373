"""Behind a proxy that speaks TLS: the client trusts what the machine trusts; no other server gets a token."""

import asyncio
import json
import ssl
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import trustme

from lineshaft import Agent, Lineshaft, NewTask, TaskContext, http_client
from lineshaft.engine.engine import Engine
from lineshaft.engine.tokens import Tokens
from lineshaft.errors import UnavailableError
from lineshaft.model.states import Status
from lineshaft.types import Scope
from tests.http_server import ServerThread
from tests.proxy import Proxy, listening


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """One that this machine trusts."""
    made = trustme.CA()
    made.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    http_client.trusted.cache_clear()
    return made


@asynccontextmanager
async def behind_tls(url: str, certificate: trustme.LeafCert) -> AsyncIterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    parts = urlsplit(url)
    proxy = Proxy(lambda: asyncio.open_connection(parts.hostname, parts.port))
    async with listening(proxy, context) as port:
        yield f"https://127.0.0.1:{port}"


async def test_work_with_a_token(dsn: str, server_thread: ServerThread, authority: trustme.CA) -> None:
    """Submitting, claiming, the heartbeats with their own connection, completing."""
    async with Engine(dsn) as engine:
        token = (await Tokens(engine.database).create("ci", Scope.ADMIN)).token
    agent = Agent("ann")

    @agent.task("greet")
    async def greet(ctx: TaskContext, name: str) -> str:
        ctx.progress("which makes it send a heartbeat")
        with psycopg.connect(dsn, autocommit=True) as look:
            while True:
                if look.execute("SELECT FROM lineshaft.task_live WHERE heartbeat_at > started_at").fetchall():
                    break
                await asyncio.sleep(0)
        return f"hello {name}"

    with server_thread.serving(dsn, auth=True) as plain:
        async with (
            behind_tls(plain, authority.issue_cert("127.0.0.1")) as url,
            Lineshaft(url, token=token) as shaft,
        ):
            task = await shaft.submit(NewTask("greet", spec={"name": "Ada"}))
            await agent.run(shaft, until_idle=True, handle_signals=False)
            assert (await shaft.wait(task)).output.data == "hello Ada"


async def command(*arguments: str) -> tuple[bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lineshaft.cli.main", *arguments), stdout=PIPE, stderr=PIPE
    )
    return await process.communicate()


async def test_the_command_line(dsn: str, server_thread: ServerThread, authority: trustme.CA) -> None:
    with server_thread.serving(dsn) as plain:
        async with behind_tls(plain, authority.issue_cert("127.0.0.1")) as url:
            shown, _ = await command("submit", "greet", "--url", url, "--json")
    assert json.loads(shown)["status"] == Status.READY


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("names", "is_known", "said"),
    [
        ("127.0.0.1", False, "unable to get local issuer"),
        ("queue.example", True, "not valid for '127.0.0.1'"),
    ],
    ids=["unknown authority", "another's certificate"],
)
async def test_somebody_else_is_told_nothing(
    authority: trustme.CA, names: str, is_known: bool, said: str
) -> None:
    heard = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1))
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (authority if is_known else trustme.CA()).issue_cert(names).configure_cert(context)
    async with await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"certificate is not trusted .*{said}.*SSL_CERT_FILE"):
            async with Lineshaft(url, token="lsk_secret"):
                pass
        _, output = await command("stats", "--url", url)
    assert said in output.decode()
    assert b"".join(heard) == b""
