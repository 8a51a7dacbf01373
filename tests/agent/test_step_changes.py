"""Durable steps across a deployment: arguments and return types that change between two attempts."""

from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from lineshaft import (
    Agent,
    Fail,
    Lineshaft,
    NewTask,
    Resolution,
    SyncTaskContext,
    TaskContext,
)
from lineshaft.agent.steps import StepCall
from lineshaft.errors import InvalidInputError
from lineshaft.model.states import Status
from lineshaft.types import Task
from tests.agent.helpers import AT_ONCE, attempts, drain, one, result

STYLES = ["async", "sync"]


class Search:
    """Counts what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, query: str) -> str:
        self.ran.append(query)
        return query.upper()


def searching(search: Search, **options: Any) -> Agent:
    """An agent whose step gets the number of the attempt, and which fails twice."""
    agent = Agent("a")

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> str:
        found: str = await ctx.step("search", search, f"query {ctx.attempt}", **options)
        if ctx.attempt < 3:
            raise RuntimeError("half way")
        return found

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> str:
        found: str = ctx.step("search", search, f"query {ctx.attempt}", **options)
        if ctx.attempt < 3:
            raise RuntimeError("half way")
        return found

    return agent


def assert_mismatch(task: Task, *texts: str) -> None:
    assert (task.status, task.failure_category) == (Status.DEAD_LETTERED, "step_mismatch")
    for text in texts:
        assert text in (task.failure_reason or "")


@pytest.mark.parametrize("style", STYLES)
async def test_other_arguments_are_refused_and_a_person_decides(
    shaft: Lineshaft, connection: psycopg.Connection, style: str
) -> None:
    search = Search()

    task = await one(shaft, searching(search), style, retry=AT_ONCE, max_attempts=9)

    assert search.ran == ["query 1"]
    assert_mismatch(
        task,
        "Step 'search' was recorded by an earlier attempt with other arguments",
        f"lineshaft dlq resolve {task.id} --resolution retry --forget-step search",
        "on_change='rerun' or on_change='reuse'",
    )
    assert [attempt.category for attempt in await attempts(shaft, task.id)] == ["error", "step_mismatch"]
    letter = await shaft.get_dead_letter(task.id)
    assert not letter.poison_pill
    # The breaker has counted the error alone.
    assert connection.execute(
        "SELECT failures FROM lineshaft.breaker WHERE key = %s", (style,)
    ).fetchall() == [(1,)]


@pytest.mark.parametrize("style", STYLES)
async def test_rerun_runs_the_step_again_and_replaces_its_result(shaft: Lineshaft, style: str) -> None:
    search = Search()
    agent = searching(search, on_change="rerun")

    task = await one(shaft, agent, style, retry=AT_ONCE)

    assert task.result == "QUERY 3"
    assert search.ran == ["query 1", "query 2", "query 3"]
    assert await shaft.steps(task.id) == {"search": "QUERY 3"}


@pytest.mark.parametrize("style", STYLES)
async def test_a_step_that_ran_again_is_recorded_with_its_new_arguments(shaft: Lineshaft, style: str) -> None:
    search = Search()
    agent = Agent("a")

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> str:
        query = "old" if ctx.attempt == 1 else "new"
        found = [await ctx.step("search", search, query, on_change="rerun") for _ in range(2)]
        if ctx.attempt < 3:
            raise RuntimeError("half way")
        return " ".join(found)

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> str:
        query = "old" if ctx.attempt == 1 else "new"
        found = [ctx.step("search", search, query, on_change="rerun") for _ in range(2)]
        if ctx.attempt < 3:
            raise RuntimeError("half way")
        return " ".join(found)

    assert await result(shaft, agent, style, retry=AT_ONCE) == "NEW NEW"
    assert search.ran == ["old", "new"]


@pytest.mark.parametrize("style", STYLES)
async def test_reuse_takes_the_recorded_result(shaft: Lineshaft, style: str) -> None:
    search = Search()

    assert await result(shaft, searching(search, on_change="reuse"), style, retry=AT_ONCE) == "QUERY 1"
    assert search.ran == ["query 1"]


@pytest.mark.parametrize("style", STYLES)
async def test_a_key_stands_for_the_arguments(shaft: Lineshaft, style: str) -> None:
    search = Search()

    assert await result(shaft, searching(search, key=["v1", 7]), style, retry=AT_ONCE) == "QUERY 1"
    assert search.ran == ["query 1"]


async def test_another_key_is_refused(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        await ctx.step("search", str, "same", key=ctx.attempt)
        raise RuntimeError("half way")

    assert_mismatch(await one(shaft, agent, "t", retry=AT_ONCE), "Step 'search'")


async def test_two_keys_in_one_run_are_refused(shaft: Lineshaft) -> None:
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> None:
        for key in (1, 2):
            await ctx.step("search", str, "same", key=key)

    task = await one(shaft, agent, "t", max_attempts=1)

    assert "was called with other arguments before" in (task.failure_reason or "")


async def test_arguments_without_a_form_in_json_count_by_their_type(shaft: Lineshaft) -> None:
    """The context and a lambda are other objects in every attempt."""
    agent = Agent("a")

    async def count(ctx: TaskContext, words: set[str], split: Any) -> int:
        return len(words | set(split(ctx.type)))

    @agent.task("t")
    async def handler(ctx: TaskContext) -> int:
        found: int = await ctx.step("count", count, ctx, {"x", "y", "z"}, lambda text: [text])
        if ctx.attempt == 1:
            raise RuntimeError("half way")
        return found

    assert await result(shaft, agent, "t", retry=AT_ONCE) == 4


async def test_steps_without_a_digest_are_accepted_as_they_are(
    shaft: Lineshaft, connection: psycopg.Connection
) -> None:
    """As agents in other languages may record them."""
    search = Search()
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        found = await ctx.step("search", search, f"query {ctx.attempt}")
        if ctx.attempt == 1:
            await ctx.step(
                "forget", lambda: connection.execute("UPDATE lineshaft.step SET digest = NULL").rowcount
            )
            raise RuntimeError("half way")
        return found

    assert await result(shaft, agent, "t", retry=AT_ONCE) == "QUERY 1"


@pytest.mark.parametrize("forget", [["search"], "all"])
async def test_a_person_lets_a_refused_step_run_again(shaft: Lineshaft, forget: Any) -> None:
    search, keep = Search(), Search()
    agent = Agent("a")
    deployed = ["old"]

    @agent.task("child")
    async def child() -> None: ...

    @agent.task("t")
    async def handler(ctx: TaskContext) -> str:
        await ctx.step("keep", keep, "same")
        await ctx.spawn("children", [NewTask("child")])
        found = await ctx.step("search", search, deployed[0])
        if deployed == ["old"]:
            raise Fail("the deployment is near", "invalid_input")
        return found

    task = await one(shaft, agent, "t")
    deployed[0] = "new"
    await shaft.retry(task.id)
    await drain(shaft, agent)
    assert_mismatch(await shaft.get(task.id))
    with pytest.raises(InvalidInputError, match="has no recorded step 'serach'"):
        await shaft.resolve(task.id, Resolution.RETRY, reviewer="ann", forget_steps=["search", "serach"])
    assert set(await shaft.steps(task.id)) == {"keep", "search", "spawn:children"}

    await shaft.resolve(task.id, Resolution.RETRY, reviewer="ann", forget_steps=forget)
    await drain(shaft, agent)

    assert (await shaft.get(task.id)).result == "NEW"
    assert search.ran == ["old", "new"]
    assert keep.ran == ["same"] * (2 if forget == "all" else 1)
    assert len((await shaft.list(type="child")).items) == 1
    resolved = [
        e async for e in shaft.events(None, task_id=task.id, follow=False) if e.kind == "task.resolved"
    ]
    assert resolved[-1].data["forget_steps"] == forget


async def test_many_dead_letters_forget_a_step_at_once(shaft: Lineshaft) -> None:
    """Each on its own: one that doesn't have the step is refused and stays."""
    agent = Agent("a")

    @agent.task("t")
    async def handler(ctx: TaskContext, step: str) -> None:
        await ctx.step(step, str, "x")
        raise Fail("no", "invalid_input")

    ids = [(await one(shaft, agent, "t", spec={"step": name})).id for name in ("a", "a", "b")]

    done = await shaft.resolve_all(Resolution.RETRY, reviewer="ann", type="t", forget_steps=["a"])

    assert set(done.resolved) == set(ids[:2])
    assert [(refusal.task_id, refusal.code) for refusal in done.refused] == [(ids[2], "invalid_input")]
    assert [await shaft.steps(task_id) for task_id in ids] == [{}, {}, {"b": "x"}]


@pytest.mark.parametrize(
    ("resolution", "forget", "fault"),
    [
        (Resolution.CANCEL, ["a"], "is only valid for retry and modify_and_retry"),
        (Resolution.RETRY, [], "must be a list of one or more names of steps"),
        (Resolution.RETRY, "some", "must be a list of names or \"all\", got 'some'"),
    ],
)
async def test_what_cannot_be_forgotten(
    shaft: Lineshaft, resolution: Resolution, forget: Any, fault: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        await shaft.resolve("task_1", resolution, reviewer="ann", forget_steps=forget)

    assert dict(refused.value.errors)["forget_steps"].startswith(fault)


@dataclass
class Draft:
    title: str


@dataclass
class LongDraft:
    title: str
    words: int


@pytest.mark.parametrize("style", STYLES)
async def test_a_recorded_result_that_no_longer_fits_is_an_error_that_names_both(
    shaft: Lineshaft, style: str
) -> None:
    before, after = Agent("a"), Agent("a")

    def old() -> Draft:
        return Draft("t")

    def new() -> LongDraft:
        return LongDraft("t", 1)

    def deploy(agent: Agent, write: Any) -> None:
        @agent.task("async")
        async def asynchronous(ctx: TaskContext) -> None:
            await ctx.step("write", write)
            raise RuntimeError("half way")

        @agent.task("sync")
        def synchronous(ctx: SyncTaskContext) -> None:
            ctx.step("write", write)
            raise RuntimeError("half way")

    deploy(before, old)
    deploy(after, new)
    task = await one(shaft, before, style, retry=AT_ONCE, max_attempts=1)
    await shaft.retry(task.id)
    await drain(shaft, after)

    assert_mismatch(
        await shaft.get(task.id),
        "The recorded result of step 'write' is an object with 'title'",
        "LongDraft, the return type of",
        "missing required field `words`",
        "--forget-step write",
    )


@pytest.mark.parametrize("style", STYLES)
async def test_a_result_that_does_not_fit_its_annotation_is_not_recorded(
    shaft: Lineshaft, style: str
) -> None:
    """Otherwise the first run would go on with something that a replay refuses."""
    agent = Agent("a")

    def untrue() -> int:
        return "text"  # type: ignore[return-value]

    @agent.task("async")
    async def asynchronous(ctx: TaskContext) -> None:
        await ctx.step("u", untrue)

    @agent.task("sync")
    def synchronous(ctx: SyncTaskContext) -> None:
        ctx.step("u", untrue)

    task = await one(shaft, agent, style, max_attempts=1)

    assert task.failure_category == "invalid_output"
    assert "Step 'u' returned a text, which doesn't fit int, the return type of" in (
        task.failure_reason or ""
    )
    assert await shaft.steps(task.id) == {}


@pytest.mark.parametrize("option", [{"key": 1}, {"on_change": "reuse"}])
def test_a_function_with_a_parameter_of_that_name_needs_a_lambda(option: dict[str, Any]) -> None:
    def sort(key: str = "", on_change: str = "") -> str:
        return key + on_change

    with pytest.raises(ValueError, match=r"sort has a parameter 'key', which is also an option of ctx\.step"):
        StepCall.of(sort, (), option)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="on_change must be refuse, rerun or reuse, got 'again'"):
        StepCall.of(str, (), {"on_change": "again"})


def digest(*args: Any, **kwargs: Any) -> str:
    return StepCall.of(str, args, kwargs).digest()


class Connection:
    pass


def test_equal_arguments_have_equal_digests() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(a=1, b=2) == digest(b=2, a=1)
    assert digest({2: "b", 1: "a"}) == digest({1: "a", 2: "b"})
    assert digest(Connection()) == digest(Connection())
    assert digest([Connection(), 1]) == digest([Connection(), 1])
    assert digest(Draft("t")) == digest(Draft("t"))
    # In any process: the order of a set differs from process to process.
    assert digest({"x", "y", ("z", 1)}) == "8a82f7d626120b5d85d8b276fa93f49b"
    assert digest("x", n=1) == "767e7604606ef753b7b9db2b8a20bc9f"


def test_other_arguments_have_other_digests() -> None:
    loop: list[Any] = []
    loop.append(loop)
    values = [
        *(None, 0, 1, "1", 1.5, True, [1], [[1]], {"a": 1}, {1: "a"}, {1: "b"}, {(1, 2): 3}, 2**70, 2**71),
        *(Draft("t"), Draft("u"), [Connection(), 1], [Connection(), 2], loop, lambda: 1),
    ]

    assert (
        len({digest(value) for value in values} | {digest(), digest(a=1), digest(key=1)}) == len(values) + 3
    )
