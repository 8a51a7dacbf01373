"""Who may call, from where, and how much they may send."""

import asyncio
from typing import Any

import psycopg
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lineshaft import Lineshaft
from lineshaft.dashboard.dashboard import Dashboard
from lineshaft.errors import SettingsError
from lineshaft.integrations.officeplane import sockets
from lineshaft.operations.operation import Operation
from lineshaft.server.app import OPERATIONS, create_app
from lineshaft.server.framework import middleware, streams
from lineshaft.server.framework.auth import check_exposure, is_loopback
from lineshaft.server.framework.limits import MAX_DEPTH
from lineshaft.server.routes import work_calls
from lineshaft.settings import Settings
from lineshaft.types import Scope
from tests.integrations.officeplane.test_sockets import listening
from tests.server.client import Client, Reply, read_reply
from tests.server.conftest import Serve, Served, serving, until
from tests.server.test_waiting import claiming, waiting

#: Bodies that pass the first look, for operations whose example would do more than that.
BODIES: dict[str, Any] = {
    "claim_work": {"incarnation": 1},
    # The example is for those who may cancel everything.
    "cancel_task": {"claim_token": "x"},
}

#: Not only this machine.
EVERYWHERE = "0.0.0.0"  # noqa: S104 - not listened on
#: Pages that describe the API and show no data.
PAGES = {"/openapi.json", "/docs"}


def path_of(operation: Operation[Any, Any]) -> str:
    path = operation.path
    if operation.name == "put_source":
        # With the scope agent, for an agent's own schedules only.
        return "/v1/sources/agent:a/daily"
    for name in ("{id:path}", "{id}", "{key:path}", "{name:path}", "{name}"):
        path = path.replace(name, "unknown")
    return path


async def test_nothing_else_is_routed(served: Served) -> None:
    routed = {getattr(route, "path", "") for route in create_app(served.service).routes}

    dashboard = {route.path for route in Dashboard(served.service).routes()}
    assert routed == PAGES | dashboard | set(sockets.PATHS) | {operation.path for operation in OPERATIONS}
    assert not any(path.startswith(("/v1", "/api")) for path in dashboard)
    assert sockets.SCOPE is Scope.READ


@pytest.mark.slow("calls every route with every scope")
async def test_a_token_of_each_scope_can_do_what_it_should_and_nothing_more(serve: Serve) -> None:
    """Every operation with every scope: refused with 403, or let through to whatever it comes to then."""
    async with serve(auth=True) as served:
        made = {scope: (await served.service.tokens.create(scope, scope)).token for scope in Scope}
        clients = {scope: Client(served.client.port, token) for scope, token in made.items()}
        for operation in OPERATIONS:
            path, body = path_of(operation), BODIES.get(operation.name, operation.example or {})
            for scope, client in clients.items():
                reply = await client.request(operation.method, path, body)
                allowed = operation.scope is None or scope.includes(operation.scope)
                assert (reply.status != 403) is allowed, (operation.name, scope, reply)
                assert reply.status != 500
                if operation.name != "deliver_webhook":  # It takes a signature instead of a token.
                    assert reply.status != 401
                if not allowed:
                    assert operation.scope in reply.json["detail"], "it says which scope it takes"
            bare = await served.client.request(operation.method, path, body)
            if operation.name != "deliver_webhook":
                assert (bare.status == 401) is (operation.scope is not None), operation.name


@pytest.mark.slow("calls every route")
async def test_what_is_refused_changes_nothing(serve: Serve) -> None:
    """A scope below the one that is needed, on a task, an agent and a lock that are really there."""
    async with serve(auth=True) as served:
        boss = Client(served.client.port, (await served.service.tokens.create("boss", "admin")).token)
        await boss.register("coder-1")
        await boss.submit(lock_key="doc:1")
        task_id, token = await boss.hold({"id": "coder-1", "incarnation": 1})
        waiting = await boss.submit()
        weaker = {
            scope: Client(served.client.port, (await served.service.tokens.create(scope, scope)).token)
            for scope in Scope
        }
        before = [await everything(boss)]
        for operation in OPERATIONS:
            path = operation.path.replace("{name:path}", "step").replace("{key:path}", "doc:1")
            for name in (task_id, waiting["id"], "coder-1"):
                named = path.replace("{id:path}", name).replace("{id}", name)
                body = {**(operation.example or {}), "claim_token": token} if operation.wire.body else {}
                for scope, client in weaker.items():
                    if operation.scope is not None and not scope.includes(operation.scope):
                        refused = await client.request(operation.method, named, body)
                        assert refused.status == 403, operation.name
        assert [await everything(boss)] == before


async def everything(client: Client) -> list[Any]:
    """All that calls could have changed."""
    tasks = (await client.get("/v1/tasks")).json["items"]
    for task in tasks:
        # It moves with time.
        del task["effective_priority"]
    lists = [
        (await client.get(f"/v1/{name}")).json
        for name in ("agents", "locks", "breakers", "slowdowns", "dags", "dead-letters")
    ]
    events = (await client.get("/v1/events")).json["items"]
    return [tasks, lists, [(event["kind"], event["task_id"]) for event in events]]


async def test_an_agent_cancels_only_what_it_holds(serve: Serve) -> None:
    async with serve(auth=True) as served:
        boss = Client(served.client.port, (await served.service.tokens.create("boss", "operate")).token)
        client = Client(served.client.port, (await served.service.tokens.create("agent", "agent")).token)
        free = await boss.submit(priority=90)
        await boss.submit(priority=1)
        held, token = await client.hold(await client.register())

        refused = await client.post(f"/v1/tasks/{free['id']}/cancel", {})
        guessed = await client.post(f"/v1/tasks/{free['id']}/cancel", {"claim_token": token})
        own = await client.post(f"/v1/tasks/{held}/cancel", {"claim_token": token})
        by_boss = await boss.post(f"/v1/tasks/{free['id']}/cancel", {})

        assert (refused.status, refused.code) == (403, "forbidden")
        assert (guessed.status, guessed.code) == (409, "stale_claim")
        assert own.json["status"] == by_boss.json["status"] == "CANCELLED"


@pytest.mark.parametrize("header", ["Bearer lsh_wrong", "Bearer", "Basic abc", "lsh_wrong", "Bearer \u00e9"])
@pytest.mark.parametrize("auth", [False, True])
async def test_a_token_that_is_none_is_refused_everywhere(serve: Serve, header: str, auth: bool) -> None:
    async with serve(auth=auth) as served:
        reply = await served.client.request("GET", "/v1/tasks", headers={"Authorization": header})

    assert (reply.status, reply.code) == (401, "unauthorized")
    assert reply.headers["www-authenticate"] == "Bearer"


async def test_a_token_counts_also_where_none_is_needed(served: Served) -> None:
    reader = Client(served.client.port, (await served.service.tokens.create("r", "read")).token)

    assert (await reader.get("/v1/tasks")).status == 200
    assert (await reader.post("/v1/tasks", {"type": "x"})).code == "forbidden"


async def test_a_revoked_token_ends_with_the_next_request(serve: Serve) -> None:
    async with serve(auth=True) as served:
        record = await served.service.tokens.create("mine", "read")
        client = Client(served.client.port, record.token)
        assert (await client.get("/v1/tasks")).status == 200

        await served.service.tokens.revoke(record.id)

        assert (await client.get("/v1/tasks")).code == "unauthorized"


async def test_a_claim_that_waits_gets_nothing_once_its_token_is_revoked(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is for others, at once and with all its attempts."""
    monkeypatch.setattr(work_calls, "ALLOWED_FOR_SEC", 0.0)
    async with asyncio.timeout(60), serve(auth=True) as served:
        tokens = served.service.tokens
        record = await tokens.create("gone", "agent")
        client = Client(served.client.port, record.token)
        agent = await client.register()
        waiter = claiming(client, agent, start=True)
        await waiting(served, 1)

        await tokens.revoke(record.id)
        other = Client(served.client.port, (await tokens.create("here", "agent")).token)
        task = await other.submit()

        assert (await waiter).code == "unauthorized"
        (item,) = await other.claim(await other.register("other"), wait_sec=60)
        assert (item["task"]["id"], item["task"]["attempts"]) == (task["id"], task["attempts"])


async def test_a_claim_that_waits_without_a_token_gets_nothing_once_the_first_one_exists(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_calls, "ALLOWED_FOR_SEC", 0.0)
    waiter = claiming(served.client, await served.client.register())
    await waiting(served, 1)

    owner = Client(served.client.port, (await served.service.tokens.create("first", "agent")).token)
    await owner.submit()

    assert (await waiter).code == "unauthorized"


async def test_only_a_hash_of_a_token_is_kept(served: Served, connection: psycopg.Connection) -> None:
    token = (await served.service.tokens.create("mine", "read")).token

    (row,) = connection.execute("SELECT to_jsonb(token)::text FROM lineshaft.token").fetchall()

    assert token not in row[0]
    assert token.removeprefix("lsh_") not in row[0]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST", 200),
        ("[::1]:{port}", 200),
        ("127.0.0.9:9999", 200),
        ("queue.internal", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("", 403),
        ("localhost:x", 403),
        ("[", 403),
        ("[::1", 403),
        ("a]b", 403),
    ],
)
async def test_a_foreign_host_is_refused(serve: Serve, host: str, status: int) -> None:
    async with serve(allowed_hosts=("Queue.internal",)) as served:
        headers = {"Host": host.format(port=served.client.port)}

        for path in ("/v1/tasks", "/openapi.json"):
            reply = await served.client.request("GET", path, headers=headers)
            assert reply.status == status
            if status != 200:
                assert reply.code == "forbidden"
        for path in ("/healthz", "/readyz"):
            assert (await served.client.request("GET", path, headers=headers)).status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:{port}", 201),
        ("https://127.0.0.1:{port}", 201),
        ("http://127.0.0.1:1", 403),
        ("http://localhost:{port}", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("http://[", 403),
        ("http://127.0.0.1:x", 403),
        ("", 403),
    ],
)
async def test_a_page_of_another_origin_cant_call(client: Client, origin: str, status: int) -> None:
    headers = {"Origin": origin.format(port=client.port)}

    reply = await client.post("/v1/tasks", {"type": "x"}, headers=headers)

    assert reply.status == status
    for method in ("POST", "PATCH", "DELETE"):
        asking = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "content-type"}
        preflight = await client.request("OPTIONS", "/v1/tasks", headers=headers | asking)
        assert preflight.status in {403, 405}
        assert not [name for name in preflight.headers if name.startswith("access-control-")]
    created = (await client.get("/v1/tasks")).json["items"]
    assert len(created) == (status == 201), "what is refused is not done either"


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("cross-site", "no-cors", 403),
        ("same-site", "cors", 403),
        ("cross-site", "websocket", 403),
        ("cross-site", "navigate", 200),
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
    ],
)
async def test_a_page_of_others_cant_even_look(client: Client, site: str, mode: str, status: int) -> None:
    """A plain GET has no Origin; browsers show by other headers whose page it is. Links may be followed."""
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}

    assert (await client.request("GET", "/v1/tasks", headers=headers)).status == status
    assert (await client.request("GET", "/api/tasks", headers=headers)).status == status


async def test_a_body_that_is_too_large(serve: Serve) -> None:
    async with serve(max_body_bytes=2000) as served:
        client = served.client
        fits = await client.post("/v1/tasks", {"type": "x", "spec": {"t": "x" * 1000}})
        large = await client.post("/v1/tasks", {"type": "x", "spec": {"t": "x" * 2000}})
        chunk = b'{"type": "x", "title": "' + b"x" * 3000 + b'"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(
            b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n"
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunk), chunk)
        )
        chunked = await read_reply(reader)
        writer.close()

        assert fits.status == 201
        for reply in (large, chunked):
            assert (reply.status, reply.code) == (413, "payload_too_large")
            assert "2000" in reply.json["detail"]


@pytest.mark.slow("sends for longer than the limit")
async def test_a_body_that_is_too_large_and_takes_long_is_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender gets the response, not a reset, as long as it goes on sending."""
    monkeypatch.setattr(middleware, "DROP_SEC", 4.0)
    async with serve(max_body_bytes=2000) as served:
        now = asyncio.get_running_loop().time
        until_sec = now() + 5
        head = {"Content-Length": str(1 << 20)}
        reader, writer = await served.client.send("POST", "/v1/tasks", headers=head, raw=b"x")
        sent = 1
        while now() < until_sec:
            await served.client.get("/healthz")
            writer.write(b"x")
            sent += 1
        writer.write(b"x" * ((1 << 20) - sent))
        await writer.drain()

        assert (await read_reply(reader)).code == "payload_too_large"
        writer.close()


@pytest.mark.parametrize(("depth", "status"), [(MAX_DEPTH - 2, 201), (MAX_DEPTH + 1, 422), (1_000_000, 422)])
async def test_a_body_that_is_nested_too_deeply(client: Client, depth: int, status: int) -> None:
    raw = b'{"type": "x", "spec": {"s": "[[\\"[", "deep": %s%s}}' % (b"[" * depth, b"]" * depth)

    reply = await client.request("POST", "/v1/tasks", raw=raw)

    assert reply.status == status


async def test_brackets_that_are_never_closed(client: Client) -> None:
    reply = await client.request("POST", "/v1/tasks", raw=b'{"type": "x", "spec": ' + b"[" * 100_000)

    assert (reply.status, reply.code) == (422, "invalid_input")


async def test_many_shallow_things_are_fine(client: Client) -> None:
    reply = await client.post("/v1/tasks", {"type": "x", "spec": {"many": [[], {}] * 5_000}})

    assert reply.status == 201


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True)),
        *((EVERYWHERE, False), ("::", False), ("192.168.1.5", False), ("example.org", False)),
    ],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_no_exposure_while_no_token_exists(served: Served) -> None:
    tokens = served.service.tokens
    await check_exposure("127.0.0.1", "auto", tokens)
    with pytest.raises(SettingsError, match="lineshaft token create"):
        await check_exposure(EVERYWHERE, "auto", tokens)
    record = await tokens.create("mine", "read")
    await check_exposure(EVERYWHERE, "auto", tokens)
    await tokens.revoke(record.id)
    with pytest.raises(SettingsError):
        await check_exposure(EVERYWHERE, "auto", tokens)


async def test_tokens_cant_be_lifted_beyond_loopback(served: Served) -> None:
    await served.service.tokens.create("mine", "read")

    await check_exposure("127.0.0.1", "off", served.service.tokens)
    with pytest.raises(SettingsError, match="LINESHAFT_AUTH=off"):
        await check_exposure(EVERYWHERE, "off", served.service.tokens)


# Loopback.


async def refusal(client: Client, count: int = 400) -> Reply:
    """The first refusal; a server notices a token that another process has created within moments."""
    for _ in range(count):
        reply = await client.post("/v1/pause")
        if reply.status != 200:
            return reply
    raise AssertionError("callers without a token are still trusted")


async def test_the_first_token_closes_loopback_for_callers_without_one(serve: Serve, dsn: str) -> None:
    """Also on the other servers, and permanently: revoking it opens nothing."""
    async with serve() as one, serve() as two, Lineshaft(dsn) as shaft:
        assert (await one.client.post("/v1/pause")).status == 200
        assert (await two.client.post("/v1/resume")).status == 200

        made = await shaft.create_token("first", "operate")

        for served in (one, two):
            refused = await refusal(served.client)
            assert (refused.status, refused.code) == (401, "unauthorized")
            assert "lineshaft token create" in refused.json["detail"]
            assert (await served.client.get("/openapi.json")).status == 401
            assert (await served.client.get("/healthz")).status == 200
            holder = Client(served.client.port, made.token)
            assert (await holder.post("/v1/resume")).status == 200
        await shaft.revoke_token(made.id)
        assert (await one.client.get("/v1/tasks")).code == "unauthorized"
    async with serve() as later:
        assert later.service.needs_tokens
        assert (await later.client.get("/v1/tasks")).code == "unauthorized"


async def test_a_token_that_is_created_over_http_counts_at_once(client: Client) -> None:
    made = await client.post("/v1/tokens", {"name": "first", "scope": "admin"})

    assert made.status == 201
    assert (await client.post("/v1/tokens", {"name": "second", "scope": "admin"})).code == "unauthorized"


async def test_the_first_call_with_a_token_counts_at_once(served: Served) -> None:
    made = await served.service.tokens.create("first", "read")

    assert (await Client(served.client.port, made.token).get("/v1/tasks")).status == 200
    assert (await served.client.get("/v1/tasks")).code == "unauthorized"


async def test_calls_that_come_first_are_refused_while_the_server_looks_for_tokens(
    serve: Serve, dsn: str
) -> None:
    """Many calls at once, as the first ones of a server."""
    async with Lineshaft(dsn) as shaft:
        await shaft.create_token("first", "read")
    async with serve() as served:
        replies = await asyncio.gather(*(served.client.get("/v1/tasks") for _ in range(20)))

    assert {reply.status for reply in replies} == {401}


async def test_tokens_are_lifted_on_loopback_by_hand(serve: Serve) -> None:
    async with serve(auth="off") as served:
        made = await served.service.tokens.create("first", "read")
        reader = Client(served.client.port, made.token)

        assert (await served.client.post("/v1/pause")).status == 200
        assert (await reader.post("/v1/pause")).code == "forbidden", "a token that is sent counts"
        assert (await served.client.post("/v1/pause")).status == 200
        assert not served.service.needs_tokens


@pytest.mark.parametrize("auth", ["auto", "off"])
@pytest.mark.parametrize(
    "header",
    ["Forwarded", "X-Forwarded-For", "x-forwarded-host", "X-Forwarded-Proto", "X-Real-IP", "Via"],
)
async def test_calls_through_a_proxy_need_a_token(serve: Serve, header: str, auth: str) -> None:
    """The caller of a proxy on this machine isn't on this machine."""
    async with serve(auth=auth) as served:
        headers = {header: "for=192.0.2.1"}

        refused = await served.client.post("/v1/pause", headers=headers)
        health = await served.client.request("GET", "/healthz", headers=headers)
        made = await served.service.tokens.create("boss", "operate")
        known = await Client(served.client.port, made.token).post("/v1/pause", headers=headers)

        assert (refused.status, refused.code) == (401, "unauthorized")
        assert "proxy" in refused.json["detail"]
        assert header.lower() in refused.json["detail"]
        assert (health.status, known.status) == (200, 200)


async def test_a_socket_through_a_proxy_needs_a_token(served: Served) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with listening(served.client, headers={"X-Forwarded-For": "192.0.2.1"}):
            pass

    assert refused.value.response.status_code == 401


async def test_the_first_token_ends_streams_without_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_EVERY_SEC", 0.05)
    async with asyncio.timeout(60), served.client.stream() as stream:
        await stream.line()
        await served.service.tokens.create("first", "read")

        # It may still get the event of the token.
        assert {event["event"] for event in await stream.rest()} <= {"token.created"}


async def test_a_database_that_is_away(dsn: str, connection: psycopg.Connection) -> None:
    async with serving(dsn) as served:
        await served.client.submit()
        await disconnect(connection)

        reply = await served.client.post("/v1/tasks", {"type": "x"})

        assert (reply.status, reply.code) == (503, "unavailable")
        assert reply.headers["retry-after"] == "1"
        assert reply.json["retryable"] is True
        while (await served.client.get("/readyz")).status != 200:
            pass
        assert (await served.client.post("/v1/tasks", {"type": "x"})).status == 201, "it is back by itself"


async def test_reads_after_a_failover_succeed(dsn: str, connection: psycopg.Connection) -> None:
    """All connections of the server were closed while nobody used them, several of them for reads."""
    async with serving(dsn, max_connections=10) as served:
        made = (await served.service.tokens.create("reader", "read")).token
        reader = Client(served.client.port, made)
        await asyncio.gather(*(reader.get("/v1/stats") for _ in range(20)))
        await disconnect(connection)

        replies = [await reader.get("/v1/tasks") for _ in range(3)]
        replies += await asyncio.gather(*(reader.get("/v1/tasks") for _ in range(20)))

        assert {reply.status for reply in replies} == {200}


async def disconnect(connection: psycopg.Connection) -> None:
    """Close all other connections to the database, and wait until the server's processes have ended."""
    # Only a superuser may end autovacuum, which may be in the database.
    others = (
        "FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
        " AND pid <> pg_backend_pid()"
    )
    found = connection.execute(f"SELECT pid, pg_terminate_backend(pid) {others}").fetchall()
    pids = [pid for pid, _ in found]
    assert pids
    await until(lambda: not connection.execute(f"SELECT {others} AND pid = ANY (%s)", [pids]).fetchall())


async def test_settings_name_the_limits() -> None:
    assert Settings().max_body_bytes == 8 << 20


async def test_a_revoked_token_ends_streams_and_sockets(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_EVERY_SEC", 0.05)
    async with asyncio.timeout(60), serve(auth=True) as served:
        tokens = served.service.tokens
        token = await tokens.create("reader", "read")
        reader = Client(served.client.port, token.token)
        headers = {"Authorization": f"Bearer {token.token}"}
        async with reader.stream() as stream, listening(reader, headers=headers) as socket:
            await stream.line()
            await tokens.revoke(token.id)

            # It may still get the events of the token.
            assert {event["event"] for event in await stream.rest()} <= {"token.created", "token.revoked"}
            await socket.recv()  # the greeting
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
