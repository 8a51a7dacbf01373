"""Which account calls: until there is a token, only the server's own is trusted."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from lineshaft.cli.up import _about_tokens
from lineshaft.server.framework import auth, peers
from lineshaft.server.framework.peers import Accounts
from tests.integrations.officeplane.test_sockets import listening
from tests.ports import reserved_port
from tests.server.client import Client, Reply, read_head, read_reply
from tests.server.conftest import Serve, Served

#: An account that isn't the server's; programs take it by number.
ANOTHER = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can use another account")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, which lists accounts of sockets"
)


async def call(client: Client, request: str, account: int = ANOTHER) -> Reply:
    """Send a request from a process of this account."""
    script = f"exec 3<>/dev/tcp/127.0.0.1/{client.port}; printf '{request}' >&3; cat <&3"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script, cwd="/", stdout=asyncio.subprocess.PIPE, user=account
    )
    assert process.stdout is not None
    reply = await read_reply(process.stdout)
    await process.wait()
    return reply


def bare(method: str, path: str, *headers: str, host: str = "localhost") -> str:
    return "\\r\\n".join(
        [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    )


@needs_root
async def test_another_account_needs_a_token(served: Served) -> None:
    client = served.client
    for method, path in (
        ("GET", "/v1/tasks"),
        ("POST", "/v1/pause"),
        ("POST", "/v1/tokens"),
        ("GET", "/docs"),
    ):
        refused = await call(client, bare(method, path, "Content-Length: 0"))
        assert (refused.status, refused.code) == (401, "unauthorized"), path
        assert "another account" in refused.json["detail"]
        assert "lineshaft token create" in refused.json["detail"]
    page = await call(client, bare("GET", "/"))
    assert (page.status, page.headers["location"][:6]) == (303, "/login")
    socket_request = bare("GET", "/ws", "Upgrade: websocket", "Sec-WebSocket-Version: 13").replace(
        "Connection: close", "Connection: Upgrade\\r\\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    )
    assert (await call(client, socket_request)).status == 401
    assert (await call(client, bare("GET", "/healthz"))).status == 200

    assert (await call(client, bare("GET", "/v1/tasks"), account=os.geteuid())).status == 200
    async with listening(client):
        pass
    made = (await client.post("/v1/tokens", {"name": "first", "scope": "read"})).json["token"]
    assert (await call(client, bare("GET", "/v1/tasks", f"Authorization: Bearer {made}"))).status == 200


@needs_root
async def test_every_account_may_call_where_tokens_are_lifted_by_hand(serve: Serve) -> None:
    async with serve(auth="off") as served:
        assert (await call(served.client, bare("GET", "/v1/tasks"))).status == 200


@needs_root
async def test_a_connection_that_has_ended_has_no_account() -> None:
    """The kernel shows it with user 0, which would be the server's account if that runs as root."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        script = f"exec 3<>/dev/tcp/127.0.0.1/{address[1]}; echo >&3; read"
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", script, cwd="/", stdin=asyncio.subprocess.PIPE, user=ANOTHER
        )
        accepted, peer = await asyncio.to_thread(server.accept)
        with accepted:
            assert await Accounts().find(peer, address) == ANOTHER
            await process.communicate(b"\n")

            rows = [row.split() for row in peers.TABLES[0].read_text().splitlines()]
            (ended,) = [row for row in rows if row[2].endswith(f":{address[1]:04X}") and row[3] != "0A"]
            assert ended[1].endswith(f":{peer[1]:04X}")
            assert ended[9] == "0", "no process has it open, and soon its account is shown as 0"
            assert await Accounts().find(peer, address) is None


async def test_an_account_is_looked_up_once_for_each_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once for many that come at the same time."""
    readings: list[Path] = []
    read = peers.read_owners

    def counted(table: Path) -> dict[peers.Ends, int]:
        readings.append(table)
        return read(table)

    monkeypatch.setattr(peers, "read_owners", counted)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    for _ in range(5):
        writer.write(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers = await read_head(reader)
        await reader.readexactly(int(headers["content-length"]))
        assert status == 200
    writer.close()
    assert len(readings) == 1

    readings.clear()
    replies = await asyncio.gather(*(served.client.get("/v1/tasks") for _ in range(100)))
    assert {reply.status for reply in replies} == {200}
    assert len(readings) < 50


async def test_a_client_may_use_ipv6_for_an_address_of_ipv4(served: Served) -> None:
    """As Java does."""
    client = socket.socket(socket.AF_INET6)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("::ffff:127.0.0.1", served.client.port))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (await read_reply(reader)).status == 200
    writer.close()


async def test_addresses_of_ipv6() -> None:
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        found = await Accounts().find(client.getsockname()[:2], server.getsockname()[:2])
        assert found == os.geteuid()


async def test_where_accounts_cant_be_looked_up_a_code_makes_the_first_token(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TABLES", (Path("/proc/net/nothing"),))
    monkeypatch.setattr(auth, "_CODE_SEC", 0.0)
    async with serve() as served:
        late = Client(served.client.port, served.service.take_first_token_code())
        assert (await late.post("/v1/tokens", {"name": "late", "scope": "admin"})).code == "unauthorized"
    monkeypatch.undo()
    monkeypatch.setattr(peers, "TABLES", (Path("/proc/net/nothing"),))
    async with serve() as served:
        assert served.service.needs_tokens
        assert (await served.client.get("/v1/tasks")).code == "unauthorized"
        said = _about_tokens(served.service)
        code = said.partition("LINESHAFT_TOKEN=")[2].split()[0]
        assert f"LINESHAFT_URL=http://127.0.0.1:{served.client.port}" in said
        assert served.service.take_first_token_code() is None, "it is shown once"
        holder = Client(served.client.port, code)
        assert (await holder.get("/v1/tasks")).code == "unauthorized", "it only makes a token"
        assert (await Client(served.client.port, code[:-1]).get("/v1/tokens")).code == "unauthorized"
        assert (await holder.get("/v1/tokens")).json["items"] == []
        assert (await holder.post("/v1/tokens", {"name": "first", "scope": "read"})).status == 201
        assert (await holder.post("/v1/tokens", {"name": "second", "scope": "read"})).code == "unauthorized"


# Real proxies, as they are configured by default.


@contextmanager
def nginx(folder: Path, port: int, upstream: int, account: str) -> Iterator["subprocess.Popen[bytes]"]:
    paths = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; user {account} {GROUPS[account]}; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {paths} server {{ listen 127.0.0.1:{port};\n"
        f"location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }} }}\n"
    )
    with running(["nginx", "-c", str(config), "-p", str(folder)]) as process:
        yield process


@contextmanager
def haproxy(folder: Path, port: int, upstream: int, account: str) -> Iterator["subprocess.Popen[bytes]"]:
    config = folder / "haproxy.cfg"
    config.write_text(
        f"global\n user {account}\ndefaults\n mode http\n timeout connect 5s\n timeout client 60s\n"
        f" timeout server 60s\nfrontend in\n bind 127.0.0.1:{port}\n default_backend queue\n"
        f"backend queue\n server one 127.0.0.1:{upstream}\n"
    )
    with running(["haproxy", "-f", str(config)]) as process:
        yield process


@contextmanager
def running(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


GROUPS = {"nobody": "nogroup", "root": "root"}
PROXIES = {"nginx": nginx, "haproxy": haproxy}


@asynccontextmanager
async def behind(proxy: str, folder: Path, upstream: int, account: str) -> AsyncIterator[Client]:
    client = Client(reserved_port())
    with PROXIES[proxy](folder, client.port, upstream, account) as process:
        async with asyncio.timeout(60):
            while True:
                assert process.poll() is None, "the proxy has ended"
                try:
                    reply = await client.get("/healthz")
                except ConnectionError:
                    await asyncio.sleep(0.02)
                    continue
                assert reply.status == 200
                break
        yield client


@needs_root
@pytest.mark.parametrize("proxy", PROXIES)
async def test_callers_of_a_proxy_under_another_account_need_a_token(
    served: Served, proxy: str, tmp_path: Path
) -> None:
    if shutil.which(proxy) is None:
        pytest.skip(f"needs {proxy} (apt-get install {proxy})")
    async with behind(proxy, tmp_path, served.client.port, "nobody") as client:
        for path in ("/v1/tasks", "/v1/tokens", "/openapi.json"):
            assert (await client.get(path)).status == 401, path
        assert (await client.post("/v1/tokens", {"name": "mine", "scope": "admin"})).code == "unauthorized"
        assert (await client.post("/v1/tasks", {"type": "shell"})).code == "unauthorized"
        assert (await served.client.get("/v1/tasks")).status == 200
        made = (await served.client.post("/v1/tokens", {"name": "first", "scope": "read"})).json["token"]
        assert (await Client(client.port, made).get("/v1/tasks")).status == 200


@needs_root
@pytest.mark.parametrize("proxy", PROXIES)
async def test_a_proxy_under_the_same_account_cant_be_told_from_a_person(
    served: Served, proxy: str, tmp_path: Path
) -> None:
    """So a token has to be created before it is started, as docs/security.md says."""
    if shutil.which(proxy) is None:
        pytest.skip(f"needs {proxy} (apt-get install {proxy})")
    async with behind(proxy, tmp_path, served.client.port, "root") as client:
        assert (await client.get("/v1/tasks")).status == 200
        await served.client.post("/v1/tokens", {"name": "first", "scope": "read"})
        assert (await client.get("/v1/tasks")).code == "unauthorized"
