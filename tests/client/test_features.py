"""Newer clients of older servers: what a server hasn't announced is left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
import pytest
from msgspec.inspect import StructType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lineshaft import Agent, Lineshaft, NewTask, RateLimited, SyncLineshaft, TaskContext
from lineshaft.errors import InvalidInputError
from lineshaft.operations.agents import RegisterAgent, register_agent
from lineshaft.server.app import OPERATIONS
from lineshaft.types import NewAgent, features
from lineshaft.types.features import FEATURES, Needs, fitting
from lineshaft.types.request import Request
from tests.http_server import ServerThread
from tests.newer_server import edited_server
from tests.wire_types import wire_types


class LaterAgent(NewAgent, frozen=True, kw_only=True):
    """As a later version may declare it."""

    regions: Annotated[tuple[str, ...], Needs("regions")] = ()


class Item(Request, frozen=True, kw_only=True):
    id: str
    received: Annotated[tuple[int, ...], Needs("messages")] = ()


class Batch(Request, frozen=True, kw_only=True):
    items: list[Item]


AGENT = LaterAgent(id="later", capabilities=("code",), regions=("eu-1",))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a later version, with a feature; the announcements of servers are edited."""
    monkeypatch.setattr(features, "FEATURES", frozenset({"regions"}))


@contextmanager
def server(
    thread: ServerThread, dsn: str, *, announces: list[str] | None, takes: bool = False
) -> Iterator[tuple[str, list[Any]]]:
    """The URL of a server and the registrations that it gets; `takes`: it knows the field `regions`."""
    registrations: list[Any] = []

    def edit(path: str, answer: Any) -> Any:
        if path in {"/v1/ended", "/v1/agents"} and "features" in answer:
            del answer["features"]
            return answer | ({} if announces is None else {"features": announces})
        return answer

    def reading(app: ASGIApp) -> ASGIApp:
        async def read(scope: Scope, receive: Receive, send: Send) -> None:
            async def received() -> Message:
                message = await receive()
                if scope["path"] == "/v1/agents" and message.get("body"):
                    body = msgspec.json.decode(message["body"])
                    registrations.append(dict(body))
                    if takes:
                        body.pop("regions", None)
                        message["body"] = msgspec.json.encode(body)
                return message

            await app(scope, received, send)

        return read

    with edited_server(thread, dsn, edit) as url:
        thread.wrap(reading)
        yield url, registrations


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("announces", [None, [], ["something", "else"]])
async def test_a_field_that_the_server_has_not_announced_is_left_out(
    dsn: str, server_thread: ServerThread, announces: list[str] | None
) -> None:
    with server(server_thread, dsn, announces=announces) as (url, registrations):
        async with Lineshaft(url) as shaft:
            registered = await shaft.backend.call(register_agent, RegisterAgent(agent=AGENT))

    assert registered.features == (announces or [])
    assert registrations == [{"id": "later", "capabilities": ["code"]}]


@pytest.mark.usefixtures("later")
async def test_a_field_that_the_server_has_announced_is_sent_with_the_first_call(
    dsn: str, server_thread: ServerThread
) -> None:
    with server(server_thread, dsn, announces=["regions"], takes=True) as (url, registrations):
        async with Lineshaft(url) as shaft:
            await shaft.backend.call(register_agent, RegisterAgent(agent=AGENT))

    assert [body["regions"] for body in registrations] == [["eu-1"]]


@pytest.mark.usefixtures("later")
async def test_where_an_older_server_answers_too_it_gets_what_it_understands(
    dsn: str, server_thread: ServerThread
) -> None:
    """Behind a load balancer during an upgrade, the server that announces isn't the one that is asked."""
    with server(server_thread, dsn, announces=["regions"]) as (url, registrations):
        async with Lineshaft(url) as shaft:
            registered = await shaft.backend.call(register_agent, RegisterAgent(agent=AGENT))
            agents = (await shaft.agents()).items

    assert [sorted(body) for body in registrations] == [
        ["capabilities", "id", "regions"],
        ["capabilities", "id"],
    ]
    assert [(agent.id, agent.incarnation) for agent in agents] == [("later", registered.incarnation)]


@pytest.mark.usefixtures("later")
async def test_a_mistake_is_refused_as_ever(dsn: str, server_thread: ServerThread) -> None:
    class Misspelt(NewAgent, frozen=True, kw_only=True):
        capability: str = ""

    with server(server_thread, dsn, announces=["regions"]) as (url, registrations):
        async with Lineshaft(url) as shaft:
            with pytest.raises(InvalidInputError, match="capability: unknown field"):
                await shaft.backend.call(
                    register_agent, RegisterAgent(agent=Misspelt(id="a", capability="code"))
                )

    assert len(registrations) == 1


def test_both_transports_announce_what_this_version_has(dsn: str, server_thread: ServerThread) -> None:
    with server_thread.serving(dsn) as url:
        for where in (dsn, url):
            with SyncLineshaft(where) as shaft:
                registered = shaft.loop.run(
                    shaft.shaft.backend.call(register_agent, RegisterAgent(agent=NewAgent(id="a")))
                )
                assert registered.features == sorted(FEATURES)


def test_fields_are_left_out_wherever_they_are() -> None:
    batch = Batch(items=[Item(id="a"), Item(id="b", received=(1, 2))])

    assert fitting(batch, {"messages"}) is batch
    assert fitting(batch, set()) == Batch(items=[Item(id="a"), Item(id="b")])
    assert fitting({"batch": batch, "spec": {"received": [1]}}, set()) == {
        "batch": Batch(items=[Item(id="a"), Item(id="b")]),
        "spec": {"received": [1]},
    }
    assert msgspec.json.encode(fitting(batch.items[1], set())) == b'{"id":"b"}'


def test_every_feature_that_a_field_needs_is_announced() -> None:
    """Otherwise no server would ever get the field."""
    requests = wire_types(
        kind for operation in OPERATIONS for kind in (operation.wire.body, operation.wire.query)
    )
    needed = {
        mark.feature
        for request in requests
        if isinstance(request, StructType)
        for field in msgspec.structs.fields(request.cls)
        for mark in getattr(field.type, "__metadata__", ())
        if isinstance(mark, Needs)
    }

    assert needed <= FEATURES


@pytest.mark.parametrize(("announces", "category"), [([], "crash"), ([features.ERROR_CATEGORY], "error")])
async def test_an_older_server_is_told_of_a_crash(
    dsn: str, server_thread: ServerThread, announces: list[str], category: str
) -> None:
    """It would take `error` for a category of the agent's own, which `crash` in `retry_on` doesn't cover."""
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> None:
        raise KeyError("x")

    with server(server_thread, dsn, announces=announces) as (url, _):
        async with Lineshaft(url) as shaft:
            task = await shaft.submit(NewTask("t", max_attempts=1))
            await agent.run(shaft, until_idle=True, handle_signals=False)
            assert (await shaft.get(task)).failure_category == category


async def test_an_older_server_gets_neither_accounts_nor_instants(
    dsn: str, server_thread: ServerThread
) -> None:
    """It is told how long the wait is; handlers get no account."""
    agent = Agent("a", accounts=["team-1"])
    used: list[str | None] = []

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        used.append(ctx.account)
        raise RateLimited(retry_at=datetime.now(UTC) + timedelta(minutes=30), account="team-1")

    with server(server_thread, dsn, announces=[features.ERROR_CATEGORY]) as (url, registrations):
        async with Lineshaft(url) as shaft:
            task = await shaft.submit(NewTask("t"))
            await agent.run(shaft, until_idle=True, handle_signals=False)
            found = await shaft.get(task)
            keys = [slowdown.key for slowdown in (await shaft.slowdowns()).items]

    assert all("accounts" not in body for body in registrations)
    assert (used, keys, found.attempts) == ([None], ["*"], 0)
    assert found.retry_at is not None
    assert timedelta(minutes=29) < found.retry_at - datetime.now(UTC) < timedelta(minutes=31)
