"""Clients of a newer server: a value, a code or a field that this version doesn't know stops nothing."""

import asyncio
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from lineshaft import Agent, Lineshaft, NewTask, Status
from lineshaft.engine.engine import Engine
from lineshaft.errors import (
    ForbiddenError,
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    RateLimitedError,
    UnavailableError,
)
from lineshaft.types import NewSource, Problem, Scope, SourceKind
from tests.agent.helpers import PATIENCE
from tests.cli.conftest import Cli, cli
from tests.http_server import ServerThread
from tests.newer_server import edited_server
from tests.world import Actions

__all__ = ["cli"]

#: The fields of answers whose values a newer version may extend. Those of agents and of waits have tests of
#: their own, because something depends on them.
OPEN = frozenset(
    {"status", "statuses", "tier", "code", "kind", "outcome", "last_outcome", "resolution", "scope"}
    | {"state", "category", "failure_category", "velocity_action", "overlap", "catch_up", "scheme", "change"}
)
UNREAD = ("/v1/ended", "/v1/work", "/v1/agents")


def newer(path: str, answer: Any) -> Any:
    """Every open value with `~` behind it, and a field more in each object that has one."""
    return answer if path.startswith(UNREAD) else _newer(answer)


def _newer(answer: Any, name: str = "") -> Any:
    if isinstance(answer, list):
        return [_newer(item, name) for item in answer]
    if isinstance(answer, dict):
        keys = answer if name not in {"by_status", "counts"} else {f"{key}~": answer[key] for key in answer}
        edited = {key: _newer(value, key) for key, value in keys.items()}
        return edited | {"later": [1]} if {"id", "type", "as_of", "items", *OPEN} & edited.keys() else edited
    return f"{answer}~" if name in OPEN and isinstance(answer, str) else answer


@pytest.fixture
def url(dsn: str, server_thread: ServerThread) -> Iterator[str]:
    with edited_server(server_thread, dsn, newer) as found:
        yield found


async def test_every_read_of_a_newer_server_works(url: str, engine: Engine) -> None:
    actions = Actions(engine)
    async with Lineshaft(url) as shaft:
        dead = await shaft.submit(NewTask("code"))
        await actions.kill(await actions.agent("killer"))
        task = await shaft.submit(NewTask("code", spec={"a": 1}))
        await shaft.sources.put(
            NewSource(
                name="s", kind=SourceKind.SCHEDULE, every_sec=3600.0, template={"task": {"type": "code"}}
            )
        )
        await shaft.create_token("t", Scope.READ)

        read = await shaft.get(task)
        listed = (await shaft.list()).items
        why = await shaft.why(task)
        letter = await shaft.get_dead_letter(dead)
        stats = await shaft.stats()
        source = await shaft.sources.get("s")
        assert (read.status, read.tier) == ("READY~", "normal~")
        assert {found.status for found in listed} == {"READY~", "DEAD_LETTERED~"}
        assert {reason.code for reason in why.reasons} == {"no_capable_agent~"}
        assert why.summary.startswith("READY~ (no_capable_agent~: ")
        assert (letter.status, letter.category) == ("DEAD_LETTERED~", "auth_failure~")
        assert stats.by_status["READY~"] == 1  # type: ignore[index]
        assert (source.kind, source.overlap, source.catch_up) == ("schedule~", "skip~", "one~")
        assert [token.scope for token in await shaft.tokens()] == ["read~"]
        assert (await shaft.limits()).velocity_action == "stop~"
        assert (await shaft.sources.fire("s")).outcome == "created~"
        assert [change.change for change in await shaft.sources.apply([], origin="file:x")] == []
        for reading in (shaft.dags, shaft.breakers, shaft.waiting, shaft.attention, shaft.dead_letter_groups):
            await reading()


async def test_an_unknown_state_is_not_an_end(url: str) -> None:
    async with Lineshaft(url) as shaft:
        task = await shaft.get(await shaft.submit(NewTask("code")))

    assert not task.status.ended
    assert not task.status.is_known
    assert task.result is None


async def test_a_wait_goes_on_while_the_answer_is_unknown(dsn: str, server_thread: ServerThread) -> None:
    """A newer server may say more about what has not ended; only `task` and `dag` are an end."""
    says = {"ids": "resting"}

    def edit(path: str, answer: Any) -> Any:
        if path == "/v1/ended" and says:
            return {"ids": dict.fromkeys(answer["ids"], says["ids"])}
        return answer

    with edited_server(server_thread, dsn, edit) as url:
        async with Lineshaft(url) as shaft, Engine(dsn) as engine:
            task = await shaft.submit(NewTask("code"))
            await Actions(engine).finish_all()
            with pytest.raises(TimeoutError):
                await shaft.wait(task, 0.2)
            says.clear()
            assert (await shaft.wait(task, PATIENCE)).status is Status.COMPLETED


async def test_work_goes_on_after_an_unknown_answer_to_a_heartbeat(
    dsn: str, server_thread: ServerThread
) -> None:
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()

    def edit(path: str, answer: Any) -> Any:
        if path == "/v1/work/heartbeat":
            for item in answer["items"]:
                item["status"] = "resting"
                if item["tasks"]:
                    item["tasks"] = dict.fromkeys(item["tasks"], "rest")
                    loop.call_soon_threadsafe(heard.set)
        return answer

    agent = Agent("one", heartbeat_interval_sec=0.3)

    @agent.task("code")
    async def code() -> str:
        await heard.wait()
        # The answer is on its way to the agent: what it would do, it does before the next heartbeat.
        heard.clear()
        await heard.wait()
        return "done"

    with edited_server(server_thread, dsn, edit) as url:
        async with Lineshaft(url) as shaft:
            task = await shaft.submit(NewTask("code"))
            running = asyncio.create_task(agent.run(shaft, handle_signals=False))
            assert (await shaft.wait(task, PATIENCE)).result == "done"
            assert len(await shaft.attempts(task)) == 1
            agent.stop()
            await running


async def test_commands_show_unknown_values_as_text(
    url: str, cli: Cli, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = await engine.submission.submit_dag("d", [NewTask("code", key=key) for key in ("a", "b")])
    task = submitted.tasks["a"].id
    monkeypatch.delenv("LINESHAFT_DATABASE_URL")
    monkeypatch.setenv("LINESHAFT_URL", url)

    def said(*arguments: str) -> str:
        found = cli(*arguments)
        assert (found.code, found.err) == (0, ""), arguments
        return found.out

    def run() -> None:
        assert "READY~" in said("task", "show", task)
        assert "READY~" in said("task", "list")
        assert "no_capable_agent~" in said("why", task)
        assert "2 READY~" in said("dag", "show", submitted.id)
        assert "READY#126;" in said("dag", "show", submitted.id, "--mermaid")
        assert "<svg" in said("dag", "show", submitted.id, "--svg", "-")
        assert "READY~" in said("stats")

    await asyncio.to_thread(run)


@pytest.mark.parametrize(
    ("status", "retryable", "kind"),
    [
        (403, False, ForbiddenError),
        (404, False, NotFoundError),
        (409, False, InvalidTransitionError),
        (418, False, LineshaftError),
        (422, False, InvalidInputError),
        (429, True, RateLimitedError),
        (501, False, LineshaftError),
        (507, True, UnavailableError),
    ],
)
def test_an_unknown_code_is_an_error_of_its_http_status(
    status: int, retryable: bool, kind: type[LineshaftError]
) -> None:
    error = Problem(status=status, detail="Because.", code="brand_new", retryable=retryable).exception

    assert type(error) is kind
    assert (error.code, error.retryable, str(error)) == ("brand_new", retryable, "Because.")
    assert kind.code != "brand_new"


async def test_an_unknown_code_of_a_server_is_kept(url: str) -> None:
    async with Lineshaft(url) as shaft:
        with pytest.raises(NotFoundError, match=r"There is no task task_x") as caught:
            await shaft.get("task_x")

    assert caught.value.code == "not_found~"


def test_an_unknown_value_is_its_text() -> None:
    status = Status("RESTING")

    assert (status, str(status), f"{status:>8}", hash(status)) == ("RESTING",) * 2 + (
        " RESTING",
        hash("RESTING"),
    )
    assert status == Status("RESTING")
    assert status not in list(Status)
    assert pickle.loads(pickle.dumps(status)) == copy.deepcopy(status) == status  # noqa: S301 - ours
    assert repr(status) == "<Status.RESTING: 'RESTING'>"
    match status:
        case Status.READY:
            pytest.fail("It is not READY.")
        case "RESTING":
            pass
        case _:
            pytest.fail("It is its text.")
    assert Status.in_order(["RESTING", "READY", "CREATED"]) == ["CREATED", "READY", "RESTING"]
    with pytest.raises(ValueError, match="3"):
        Status(3)  # type: ignore[arg-type]


def test_an_unknown_scope_includes_nothing() -> None:
    """A token that a newer server made for something new may do nothing here."""
    later = Scope("later")

    assert not any(later.includes(scope) for scope in (*Scope, later))
    assert not any(scope.includes(later) for scope in Scope)


async def test_a_request_with_an_unknown_value_is_refused_with_the_allowed_ones(url: str) -> None:
    async with Lineshaft(url) as shaft:
        with pytest.raises(InvalidInputError, match="expected one of CREATED, PENDING, READY"):
            await shaft.list(status="RESTING")
        with pytest.raises(
            InvalidInputError, match="must be one of schedule, webhook, files, event, observer"
        ):
            await shaft.sources.put(NewSource(name="s", kind=SourceKind("moon"), template={}))
        with pytest.raises(InvalidInputError, match="must be one of read, submit, agent, operate, admin"):
            await shaft.create_token("t", "all")
