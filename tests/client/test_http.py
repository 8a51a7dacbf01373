"""What only the client over HTTP can meet: tokens, servers that are away or something else, lost answers."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeVar

import msgspec
import psycopg
import pytest

from lineshaft import Agent, Lineshaft, NewTask, SyncLineshaft
from lineshaft.checks.registry import Checks
from lineshaft.client.features import ServerFeatures
from lineshaft.client.http_backend import HttpBackend
from lineshaft.client.http_work import HttpHeartbeats
from lineshaft.client.problems import exception_of
from lineshaft.engine.engine import Engine
from lineshaft.engine.tokens import Tokens
from lineshaft.errors import (
    ForbiddenError,
    InvalidInputError,
    LineshaftError,
    PayloadTooLargeError,
    UnauthorizedError,
    UnavailableError,
)
from lineshaft.http_client import Address, HttpPool
from lineshaft.model.states import Status
from lineshaft.operations import tasks
from lineshaft.operations.wire import encode
from lineshaft.types import Scope, protocol
from lineshaft.types.assignments import Assignment, assignments
from lineshaft.types.work import (
    Cancellation,
    Child,
    Claim,
    ClaimedTask,
    ClaimRef,
    Completion,
    Failure,
    NewCheckpoint,
    NewStep,
    Presence,
    Release,
    Resumed,
    Spent,
)
from tests.agent.helpers import PATIENCE, one
from tests.http_server import ServerThread
from tests.proxy import proxied_url

B = TypeVar("B", bound=msgspec.Struct)

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def url(dsn: str, server_thread: ServerThread) -> AsyncIterator[str]:
    with server_thread.serving(dsn) as found:
        yield found


@asynccontextmanager
async def answering(answer: Answering) -> AsyncIterator[str]:
    """A server that is not Lineshaft."""
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await answer(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(talk(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*talks), PATIENCE)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        ),
        0,
    )
    return head + await reader.readexactly(length)


def reply(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


# Tokens.


async def test_a_token_is_used_and_shown_nowhere(
    dsn: str, server_thread: ServerThread, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in texts of errors, nor in logs, nor in what a debugger prints."""
    caplog.set_level(logging.DEBUG)
    secret = (await Tokens(engine.database).create("ci", Scope.SUBMIT)).token
    texts: list[str] = []
    with server_thread.serving(dsn, auth=True) as url:
        async with Lineshaft(url, token=secret) as shaft:
            task = await shaft.submit(NewTask("sum"))
            assert (await shaft.get(task)).type == "sum"
            with pytest.raises(
                ForbiddenError, match=r"needs a token with the scope agent .*'ci' has submit"
            ) as no:
                await shaft.cancel(task)
            texts += [str(no.value), repr(shaft), repr(shaft.backend), repr(vars(no.value))]
        revoked = secret[:-4] + "AAAA"
        with pytest.raises(
            UnauthorizedError, match=r"was not revoked.*LINESHAFT_TOKEN.*LINESHAFT_HOME.*token=…"
        ) as refused:
            async with Lineshaft(url, token=revoked):
                pass
        texts += [str(refused.value), repr(refused.value)]
        with pytest.raises(
            UnauthorizedError,
            match=r"needs a token.*URL unset: lineshaft token create.* --scope SCOPE\. .*LINESHAFT_TOKEN",
        ):
            async with Lineshaft(url):
                pass

    shown = "\n".join([*texts, caplog.text])
    assert secret not in shown
    assert revoked not in shown


async def test_a_token_that_can_not_be_one_is_refused_unseen() -> None:
    with pytest.raises(InvalidInputError, match="token: must be") as refused:
        Lineshaft("http://127.0.0.1:1", token="secret\r\nX-Evil: 1")

    assert "secret" not in str(refused.value)


async def test_the_token_of_the_settings_counts(
    dsn: str, server_thread: ServerThread, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = (await Tokens(engine.database).create("ci", Scope.READ)).token
    with server_thread.serving(dsn, auth=True) as url:
        monkeypatch.setenv("LINESHAFT_URL", url)
        monkeypatch.setenv("LINESHAFT_TOKEN", secret)
        async with Lineshaft() as shaft:
            assert (await shaft.list()).items == []


async def test_an_agent_whose_token_was_revoked_ends_and_says_why(
    dsn: str, server_thread: ServerThread, engine: Engine
) -> None:
    tokens = Tokens(engine.database)
    secret = (await tokens.create("fleet", Scope.AGENT)).token
    agent = Agent("a")

    @agent.task("t")
    async def handler() -> None:
        pass

    with server_thread.serving(dsn, auth=True) as url:
        async with Lineshaft(url, token=secret) as shaft:
            running = asyncio.create_task(agent.run(shaft, handle_signals=False))
            (first,) = await engine.submission.submit([NewTask("t")])
            await shaft.wait(first.id, 60)
            await tokens.revoke("fleet")
            # It is woken, and asks for work.
            await engine.submission.submit([NewTask("t")])
            with pytest.raises(UnauthorizedError, match="was not revoked"):
                await asyncio.wait_for(running, 60)


# What is for a database only.


async def test_a_transaction_of_the_caller_is_refused(url: str, connection: psycopg.Connection) -> None:
    async with Lineshaft(url) as shaft:
        with pytest.raises(InvalidInputError, match=r"connection: can't be used over HTTP.*idempotency_key"):
            await shaft.submit(NewTask("sum"), connection=connection)
        with pytest.raises(InvalidInputError, match="connection: can't be used over HTTP"):
            await shaft.submit_dag("x", [NewTask("sum")], connection=connection)
        assert (await shaft.list()).items == []


def test_also_without_an_event_loop(url: str, connection: psycopg.Connection) -> None:
    with (
        SyncLineshaft(url) as shaft,
        pytest.raises(InvalidInputError, match="connection: can't be used over HTTP"),
    ):
        shaft.submit(NewTask("sum"), connection=connection)


def test_what_belongs_to_the_other_side_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="checks: can't be used with the URL of a server"):
        Lineshaft("http://127.0.0.1:1", checks=Checks())
    with pytest.raises(InvalidInputError, match="token: is for a server"):
        Lineshaft("postgresql://127.0.0.1/x", token="t")


@pytest.mark.parametrize(
    "given", ["http://", "http://:80", "http://host:x", "http://ann:secret@host", "http://host/?token=secret"]
)
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(InvalidInputError, match="url: must") as refused:
        Lineshaft(given)

    assert "secret" not in str(refused.value)


async def test_before_it_is_open_it_says_so() -> None:
    with pytest.raises(LineshaftError, match="not open"):
        await Lineshaft("http://127.0.0.1:1").get("task_x")


# Servers that are away, silent, or something else.


async def test_no_server_listens() -> None:
    with pytest.raises(
        UnavailableError, match=r"http://127\.0\.0\.1:1 doesn't answer: .*lineshaft up.*LINESHAFT_URL"
    ):
        async with Lineshaft("http://127.0.0.1:1"):
            pass


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply("200 OK", b"<html>"), LineshaftError),
        (reply("404 Not Found", b"<html>"), LineshaftError),
        (reply("502 Bad Gateway", b"<html>"), UnavailableError),
        (reply("302 Found", b"", "Location: http://127.0.0.1:1/"), LineshaftError),
        (b"220 smtp.example.org ESMTP\r\n", UnavailableError),
    ],
)
async def test_something_else_is_there(answer: bytes, kind: type[Exception]) -> None:
    """The error says what it is; a redirection, which would carry the token elsewhere, is not followed."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with answering(other) as url:
        with pytest.raises(LineshaftError, match=url) as refused:
            async with Lineshaft(url):
                pass

    assert type(refused.value) is kind


async def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with answering(silent) as url:
        pool = HttpPool(Address.of(url), {}, size=1)
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"didn't answer GET /v1/x within 0\.2 s"):
            await pool.request("GET", "/v1/x?secret=1", within_sec=0.2, again=True)
        assert time.monotonic() - began < 30


async def test_a_kept_connection_that_was_closed_is_replaced_only_where_that_is_safe() -> None:
    """A submission that may have arrived is not sent twice: the error says that it may have arrived."""
    requests: list[bytes] = []

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(reply("200 OK", b'{"ids": {}}'))
        await writer.drain()
        # The second request on a connection arrives, and is never answered.
        requests.append(await read_request(reader))

    async with answering(once) as url, Lineshaft(url) as shaft:
        asking = tasks.AskEnded(ids=[])
        assert (await shaft.backend.call(tasks.which_ended, asking)).ids == {}
        assert [request.partition(b" ")[0] for request in requests] == [b"POST"] * 3
        await shaft.backend.call(tasks.which_ended, asking)
        before = len(requests)
        with pytest.raises(
            UnavailableError, match="The request may have been processed; check before retrying"
        ):
            await shaft.submit(NewTask("sum"))
        assert len(requests) == before + 1


async def test_what_may_be_asked_again_is_when_the_line_was_given_up(url: str) -> None:
    """A heartbeat finds out that a line is dead; calls that wait on it need not find out for themselves."""
    async with proxied_url(url) as (through, proxy):
        pool = HttpPool(Address.of(through), {}, size=2)
        await pool.request("GET", "/healthz", within_sec=PATIENCE, again=True)
        proxy.swallow()
        calls = [
            asyncio.create_task(pool.request("GET", "/healthz", within_sec=PATIENCE, again=again))
            for again in (True, False)
        ]
        assert (await calls[1]).status == 200  # it has a line of its own, which works
        assert not calls[0].done()

        pool.reconnect()

        assert (await calls[0]).status == 200
        await pool.close()


async def test_connections_are_few_and_used_again(url: str) -> None:
    async with proxied_url(url) as (through, proxy), Lineshaft(through, max_connections=2) as shaft:
        tasks = await shaft.submit_many([NewTask("sum") for _ in range(30)])
        found = await asyncio.gather(*(shaft.get(task) for task in tasks))

    assert [task.id for task in found] == [task.id for task in tasks]
    assert proxy._number == 2


async def test_a_cancelled_call_leaves_nothing_behind_for_the_next(url: str) -> None:
    async with Lineshaft(url, max_connections=1) as shaft:
        tasks = await shaft.submit_many([NewTask("sum") for _ in range(20)])
        for task in tasks:
            cancelled = asyncio.create_task(shaft.list())
            await asyncio.sleep(0)
            cancelled.cancel()
            assert (await shaft.get(task)).id == task.id


async def test_a_heartbeat_without_an_answer_ends_in_time(url: str) -> None:
    async with proxied_url(url) as (through, proxy):
        silences = 0

        def silence() -> None:
            nonlocal silences
            silences += 1

        heartbeats = HttpHeartbeats(HttpPool(Address.of(through), {}, size=1), ServerFeatures(), silence)
        answers = await heartbeats.beat([Presence("a", 1)], [], answer_within_sec=PATIENCE)
        assert answers.agents == {}
        proxy.swallow()

        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"within 0\.3 s"):
            await heartbeats.beat([], [], answer_within_sec=0.3)
        assert time.monotonic() - began < 30
        assert silences == 1

        # A new connection is made for the next one.
        await heartbeats.beat([], [], answer_within_sec=PATIENCE)
        proxy.cut()
        with pytest.raises(UnavailableError, match="doesn't answer"):
            await heartbeats.beat([], [], answer_within_sec=PATIENCE)
        proxy.restore()
        await heartbeats.beat([], [], answer_within_sec=PATIENCE)
        await heartbeats.close()


# What is too large for a request.


async def test_an_output_too_large_for_the_server_fails_its_attempt(
    dsn: str, server_thread: ServerThread
) -> None:
    """With its reason, instead of being lost and tried again and again; those beside it are handed in."""
    agent = Agent("a", max_concurrent_tasks=2)

    @agent.task("t")
    async def handler(size: int) -> str:
        return "x" * size

    with server_thread.serving(dsn, max_body_bytes=10_000) as url:
        async with Lineshaft(url) as shaft:
            small = await shaft.submit(NewTask("t", spec={"size": 10}))
            large = await one(shaft, agent, "t", spec={"size": 20_000}, max_attempts=1)
            assert (await shaft.get(small)).result == "x" * 10

    assert (large.status, large.failure_category) == (Status.DEAD_LETTERED, "invalid_output")
    assert "larger than 10000 bytes (LINESHAFT_MAX_BODY_BYTES)" in str(large.failure_reason)


# What is said between client and server.


def test_no_field_of_an_outcome_is_left_out() -> None:
    """A field that is added to one of them must be added to the body, too."""
    claim, spent = ClaimRef("task_1", 7, "token"), Spent(Decimal("0.100000"), 1, 2)
    completion = Completion(claim, b"1", b"[2]", b'{"why":"3"}', spent, "markdown")
    at = datetime(2030, 1, 1, tzinfo=UTC)
    failure = Failure(claim, "it broke", "timeout", 1.5, spent, "Traceback", retry_at=at, account="team-1")
    release = Release(claim, 2.5, spent)
    cancellation = Cancellation(claim, "enough", cascade=False, spent=spent)
    step = NewStep(claim, "a", b"1", Decimal("0.100000"), spent, "digest")
    checkpoint = NewCheckpoint(claim, b"1", spent)

    for given in (completion, failure, release, cancellation, step, checkpoint):
        assert all(getattr(given, name) is not None for name in given.__struct_fields__)
    assert sent(protocol.CompleteItem.of(completion)).completion(claim) == completion
    assert sent(protocol.FailItem.of(failure)).failure(claim) == failure
    assert sent(protocol.ReleaseItem.of(release)).release(claim) == release
    assert sent(protocol.CancelItem.of(cancellation)).cancellation(claim) == cancellation
    assert sent(protocol.StepItem.of(step)).step(claim, "a") == step
    assert sent(protocol.CheckpointItem.of(checkpoint)).checkpoint(claim) == checkpoint


def test_no_field_of_a_claim_is_left_out() -> None:
    """What the server sends is what the client gets."""
    task = msgspec.convert(
        {
            field.name: {str: "x", int: 1, bool: True, float: 1.5, Decimal: Decimal(1)}.get(field.type)
            for field in msgspec.structs.fields(ClaimedTask)
        }
        | {
            "claimed_at": datetime(2026, 2, 8, tzinfo=UTC),
            "spec": msgspec.Raw(b"{}"),
            "inputs": msgspec.Raw(b'{"notes": "task_2", "all": ["task_2", "task_2"], "large": "task_3"}'),
        },
        ClaimedTask,
        strict=False,
    )
    children = b'{"c": {"status": "COMPLETED", "output": 4}}'
    resumed = {"x": Resumed("x", b"1", b'{"a": 2}', b'{"a": "digest"}', None, children)}
    (given,) = assignments(Claim([task], resumed, {"task_2": b"3"}), lambda *_: "token")

    got = msgspec.json.decode(encode(given), type=Assignment[ClaimedTask])

    assert got == given
    assert (got.checkpoint, got.steps, got.inputs) == (1, {"a": b"2"}, {"notes": 3, "all": [3, 3]})
    assert (got.children, got.step_digests) == ({"c": Child("c", "COMPLETED", 4)}, {"a": "digest"})
    assert (got.claim, got.claim.token) == (ClaimRef("x", 1), "token")


def sent(item: B) -> B:
    """As the server decodes it."""
    return msgspec.json.decode(encode(item), type=type(item))


def test_it_says_where_it_leads_and_no_more() -> None:
    backend = HttpBackend("https://example.org/queue/", "t0ken")

    assert repr(backend) == "<HttpBackend https://example.org/queue>"
    assert "t0ken" not in repr(vars(backend))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, LineshaftError),
        (408, UnavailableError),
        (413, PayloadTooLargeError),
        (429, UnavailableError),
        (502, UnavailableError),
    ],
)
def test_what_a_proxy_says(status: int, kind: type[LineshaftError]) -> None:
    """In HTML, from a proxy: temporary errors are retried, others are raised."""
    error = exception_of(status, b"<html>no</html>", "https://queue.example")

    assert type(error) is kind
