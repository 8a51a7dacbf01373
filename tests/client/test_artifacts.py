"""`shaft.artifacts`, over the database and over HTTP, and what handlers do with artifacts."""

import asyncio
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lineshaft import (
    Agent,
    Artifact,
    Lineshaft,
    NewTask,
    RetrySpec,
    Status,
    SyncLineshaft,
    SyncTaskContext,
    TaskContext,
)
from lineshaft.errors import (
    InvalidInputError,
    InvalidTransitionError,
    LineshaftError,
    NotFoundError,
    PayloadTooLargeError,
)
from lineshaft.types.artifacts import artifact_id

LARGE = os.urandom((3 << 20) + 17)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def _pieces() -> AsyncIterator[bytes]:
    for start in range(0, len(LARGE), 100_000):
        yield LARGE[start : start + 100_000]


async def test_whatever_has_bytes_can_be_put(shaft: Lineshaft, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(LARGE)
    seen: list[int] = []
    made = await shaft.artifacts.put("empty", b"")

    for content in (LARGE, memoryview(LARGE), path, io.BytesIO(LARGE), _pieces()):
        made = await shaft.artifacts.put("data.bin", content, progress=seen.append)
        assert (made.size, seen[-1]) == (len(LARGE), len(LARGE))
    assert await shaft.artifacts.read(made.ref) == LARGE
    assert await shaft.artifacts.get(made.id) == made
    assert len((await shaft.artifacts.list()).items) == 6
    with pytest.raises(TypeError, match=r"must be bytes, a pathlib\.Path"):
        await shaft.artifacts.put("x", "text")  # type: ignore[arg-type]


async def test_reading_in_pieces_and_ranges(shaft: Lineshaft, tmp_path: Path) -> None:
    made = await shaft.artifacts.put("naïve ⚙.txt", LARGE, content_type="text/plain; charset=utf-8")
    assert (made.name, made.content_type) == ("naïve ⚙.txt", "text/plain; charset=utf-8")

    async with shaft.artifacts.open(made.ref) as reader:
        assert reader.artifact == made
        assert await reader.read(10) == LARGE[:10]
        rest = b"".join([chunk async for chunk in reader])
        assert await reader.read() == b""
    assert rest == LARGE[10:]
    async with shaft.artifacts.open(made.ref, start=5, stop=9) as reader:
        assert await reader.read() == LARGE[5:9]
    async with shaft.artifacts.open(made.ref, start=len(LARGE)) as reader:
        assert await reader.read() == b""
    saved = tmp_path / "saved"
    await shaft.artifacts.save(made.ref, saved)
    assert saved.read_bytes() == LARGE
    (tmp_path / "other").touch()
    assert saved.stat().st_mode == (tmp_path / "other").stat().st_mode, "as any new file"
    assert [path for path in _names(tmp_path) if path.startswith(".")] == []


async def test_what_is_refused(shaft: Lineshaft, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        await shaft.artifacts.get("artifact:artifact_x")
    with pytest.raises(NotFoundError):
        await shaft.artifacts.save("artifact:artifact_x", tmp_path / "x")
    with pytest.raises(InvalidInputError, match="task_id"):
        await shaft.artifacts.put("x", LARGE, task="task_x")
    made = await shaft.artifacts.put("x", b"x")
    task = await shaft.submit(NewTask("read", spec={"context_refs": [made.ref]}))
    with pytest.raises(InvalidTransitionError):
        await shaft.artifacts.delete(made.ref)
    await task.cancel()
    await shaft.artifacts.delete(made.ref)
    with pytest.raises(InvalidInputError, match="unknown artifact"):
        await shaft.submit(NewTask("read", spec={"context_refs": [made.ref]}))
    assert [path for path in _names(tmp_path) if "x" in path] == []


async def test_a_changed_content_is_noticed_over_both(shaft: Lineshaft, tmp_path: Path) -> None:
    made = await shaft.artifacts.put("x", LARGE)
    (stored,) = (tmp_path / "artifacts" / "sha256").glob("*/*")
    stored.write_bytes(LARGE[:-1] + bytes([LARGE[-1] ^ 1]))

    with pytest.raises(LineshaftError):
        await shaft.artifacts.save(made.ref, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_without_an_event_loop(blocking: SyncLineshaft, tmp_path: Path) -> None:
    made = blocking.artifacts.put("data.bin", LARGE)

    with blocking.artifacts.open(made.ref) as reader:
        assert reader.artifact == made
        assert b"".join(reader) == LARGE
    assert blocking.artifacts.read(made.ref) == LARGE
    assert blocking.artifacts.save(made.ref, tmp_path / "saved") == made
    assert blocking.artifacts.list().items == [blocking.artifacts.get(made.id)]
    blocking.artifacts.delete(made.ref)
    assert blocking.artifacts.list().items == []


async def _run(shaft: Lineshaft, agent: Agent, task: NewTask) -> Any:
    handle = await shaft.submit(task)
    running = asyncio.create_task(agent.run(shaft, until_idle=True))
    found = await shaft.wait(handle, timeout=60)
    await running
    return found


async def test_handlers_read_and_write_artifacts(shaft: Lineshaft, tmp_path: Path) -> None:
    given = await shaft.artifacts.put("question.txt", b"What is it?")
    agent = Agent("writer")
    path = tmp_path / "picture"
    path.write_bytes(LARGE)
    seen: dict[str, Any] = {}

    @agent.task("write")
    async def write(ctx: TaskContext) -> str:
        seen["input"] = ctx.inputs[given.ref]
        async with ctx.open_artifact(given.ref) as reader:
            question = await reader.read()
        await ctx.put_artifact("answer.txt", b"An answer to " + question)
        await ctx.put_artifact("answer.txt", b"An answer to " + question)
        await ctx.put_artifact("picture.png", path)
        ctx.artifact("https://example.org")
        return "done"

    @agent.task("write-in-a-thread")
    def write_in_a_thread(ctx: SyncTaskContext) -> Artifact:
        with ctx.open_artifact(given.ref) as reader:
            return ctx.put_artifact("copy.txt", reader.read())

    task = await _run(shaft, agent, NewTask("write", spec={"context_refs": [given.ref]}))
    other = await _run(shaft, agent, NewTask("write-in-a-thread"))

    assert task.status is Status.COMPLETED, task.failure_reason
    answer, picture, elsewhere = task.output.artifacts
    assert await shaft.artifacts.read(answer) == b"An answer to What is it?"
    assert (await shaft.artifacts.get(picture)).sha256
    assert elsewhere == "https://example.org"
    assert seen["input"]["name"] == "question.txt"
    assert seen["input"]["url"] == f"/v1/artifacts/{given.id}/content"
    made = (await shaft.artifacts.list(task=task.id)).items
    assert {each.ref for each in made} == {answer, picture}
    assert other.output.artifacts == [f"artifact:{other.result['id']}"]


async def test_a_repeated_attempt_leaves_one_copy(shaft: Lineshaft) -> None:
    agent = Agent("writer")

    @agent.task("write", max_attempts=3)
    async def write(ctx: TaskContext) -> None:
        await ctx.put_artifact("report.txt", b"the same each time")
        await ctx.put_artifact("log.txt", f"attempt {ctx.attempt}".encode())
        if ctx.attempt == 1:
            raise RuntimeError("not yet")

    retry = RetrySpec(initial_delay_sec=0, jitter=False)
    task = await _run(shaft, agent, NewTask("write", retry=retry))

    assert task.status is Status.COMPLETED
    names = [(await shaft.artifacts.get(ref)).name for ref in task.output.artifacts]
    assert names == ["report.txt", "log.txt"]
    made = (await shaft.artifacts.list(task=task.id)).items
    assert sorted(each.name for each in made) == ["log.txt", "log.txt", "report.txt"]
    assert await shaft.artifacts.read(task.output.artifacts[1]) == b"attempt 2"
    assert artifact_id(task.output.artifacts[0]) in {each.id for each in made}


@pytest.mark.database_only("the limit is the server's own")
async def test_an_artifact_that_is_too_large(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINESHAFT_MAX_ARTIFACT_BYTES", "1000")
    async with Lineshaft(where) as shaft:
        with pytest.raises(PayloadTooLargeError):
            await shaft.artifacts.put("x", bytes(1001))
