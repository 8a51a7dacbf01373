"""The recipes of docs/sources.md work as they are written, with payloads as the providers send them."""

import asyncio
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import LiteralString
from urllib.parse import urlencode

import pytest

from lineshaft import Agent, Lineshaft
from lineshaft.duties.event_watcher import EventWatcher
from lineshaft.duties.observer import Observer
from lineshaft.model.tasks import NewTask
from lineshaft.sources import file
from tests.docs.pages import blocks
from tests.integrations.receiver import receiving
from tests.server.client import Client, Reply
from tests.server.conftest import Served, serving, until
from tests.world import World

PAGE = "docs/sources.md"
SECRET = "a-secret-of-the-test"
REPOSITORY = {"id": 1, "full_name": "acme/site", "private": False}
PULL_REQUEST = {
    "action": "opened",
    "number": 7,
    "pull_request": {
        "title": "Fix the header",
        "diff_url": "https://github.com/acme/site/pull/7.diff",
        "user": {"login": "ann"},
        "draft": False,
    },
    "repository": REPOSITORY,
    "sender": {"login": "ann"},
}
WORKFLOW_RUN = {
    "action": "completed",
    "workflow_run": {
        "id": 42,
        "name": "CI",
        "head_branch": "main",
        "head_sha": "abc",
        "conclusion": "failure",
        "logs_url": "https://api.github.com/repos/acme/site/actions/runs/42/logs",
    },
    "repository": REPOSITORY,
}
COMMAND = {
    "team_id": "T1",
    "channel_id": "C1",
    "user_id": "U1",
    "user_name": "ann",
    "command": "/task",
    "text": "Build a landing page",
    "response_url": "https://hooks.slack.com/commands/1/2",
    "trigger_id": "1.2.3",
}


def recipes(folder: Path) -> Path:
    """The file with the recipes."""
    path = folder / "sources.yaml"
    path.write_text(next(block.text for block in blocks(PAGE) if block.title == "recipes.yaml"))
    return path


def destinations(folder: Path) -> Path:
    """The file with the destination for those who typed a command; a webhook stands for Slack."""
    path = folder / "notifications.yaml"
    text = next(block.text for block in blocks(PAGE) if "destinations:" in block.text)
    assert "type: apprise" in text
    path.write_text(text.replace("type: apprise", "type: webhook\n    secret: 0123456789abcdef"))
    return path


async def github(client: Client, name: str, kind: str, body: bytes, delivery: str) -> Reply:
    digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    headers = {
        "X-GitHub-Event": kind,
        "X-GitHub-Delivery": delivery,
        "X-Hub-Signature-256": f"sha256={digest}",
    }
    return await client.request("POST", f"/hooks/{name}", raw=body, headers=headers)


async def slack(client: Client, body: bytes) -> Reply:
    stamp = str(int(time.time()))
    digest = hmac.new(SECRET.encode(), f"v0:{stamp}:".encode() + body, hashlib.sha256).hexdigest()
    headers = {
        "Content-Type": "application/x-www-form-urlencoded",
        "X-Slack-Request-Timestamp": stamp,
        "X-Slack-Signature": f"v0={digest}",
    }
    return await client.request("POST", "/hooks/slack", raw=body, headers=headers)


async def created(served: Served, reply: Reply) -> dict[str, object]:
    assert reply.json["outcome"] == "created", reply
    task: dict[str, object] = (await served.client.get(f"/v1/tasks/{reply.json['task_ids'][0]}")).json
    return task


async def test_webhook_recipes(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINESHAFT_HOOK_GITHUB", SECRET)
    monkeypatch.setenv("LINESHAFT_HOOK_SLACK", SECRET)
    async with serving(dsn, sources=recipes(tmp_path)) as served:
        client = served.client
        opened = json.dumps(PULL_REQUEST).encode()
        review = await created(served, await github(client, "reviews", "pull_request", opened, "d1"))
        assert (review["type"], review["title"], review["lock_key"]) == (
            "review",
            "Review acme/site#7: Fix the header",
            "pr:acme/site#7",
        )
        assert review["spec"] == {"diff_url": PULL_REQUEST["pull_request"]["diff_url"], "author": "ann"}  # type: ignore[index]
        closed = json.dumps({**PULL_REQUEST, "action": "closed"}).encode()
        filtered = await github(client, "reviews", "pull_request", closed, "d2")
        assert filtered.json["outcome"] == "filtered"

        failed = json.dumps(WORKFLOW_RUN).encode()
        fix = await created(served, await github(client, "broken-builds", "workflow_run", failed, "d3"))
        assert (fix["title"], fix["created_by"]) == ("Fix CI on main", "event:broken-builds")
        again = await github(client, "broken-builds", "workflow_run", failed + b" ", "d4")
        assert again.json["outcome"] == "duplicate", "the same run"

        answer = await slack(client, urlencode(COMMAND).encode())
        goal = await created(served, answer)
        assert (answer.status, answer.json["text"]) == (200, f"On it: {goal['id']}")
        assert (goal["type"], goal["spec"], goal["tags"]) == (
            "goal",
            {"goal": "Build a landing page"},
            ["slack:ann"],
        )


async def test_a_slack_command_is_answered_when_its_work_is_done(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the duties of a server, to a receiver that stands for Slack; nothing calls response_url."""
    with receiving() as receiver:
        monkeypatch.setenv("SLACK_URL", receiver.url)
        monkeypatch.setenv("LINESHAFT_HOOK_GITHUB", SECRET)
        monkeypatch.setenv("LINESHAFT_HOOK_SLACK", SECRET)
        async with (
            serving(
                dsn, duties=True, sources=recipes(tmp_path), notifications=destinations(tmp_path)
            ) as served,
            Lineshaft(f"http://127.0.0.1:{served.client.port}") as shaft,
        ):
            # The destination begins with what happens after it was first seen.
            await until_row(served, "SELECT FROM lineshaft.destination")
            command = {**COMMAND, "response_url": f"{receiver.url}/commands/1/2"}
            answer = await slack(served.client, urlencode(command).encode())
            agent = Agent("planner", capabilities=[])

            @agent.task("goal")
            async def plan(goal: str) -> str:
                return f"planned: {goal}"

            await served.client.post("/v1/tasks", {"type": "goal", "spec": {"goal": "of another source"}})
            await agent.run(shaft, until_idle=True, handle_signals=False)
            await until(lambda: receiver.got)

    (got,) = receiver.got
    (task_id,) = answer.json["task_ids"]
    assert answer.json["text"] == f"On it: {task_id}"
    assert (got.path, got.json["kind"]) == ("/", "task_completed")
    assert got.json["text"] == (
        f"Task {task_id} (goal: Build a landing page) was completed. "
        f"To see its output: lineshaft task show {task_id}"
    )


async def until_row(served: Served, query: LiteralString) -> None:
    async with asyncio.timeout(60), served.service.engine.database.connection() as connection:
        while not (await connection.execute(query)).rowcount:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def test_recipes_for_events_and_friction(world: World, tmp_path: Path) -> None:
    engine = world.engine
    await engine.sources.apply(file.read(recipes(tmp_path)), origin="file:sources.yaml")
    tasks = [NewTask("extract", key="a"), NewTask("load", key="b", depends_on=["a"])]
    pipeline = await engine.submission.submit_dag("data pipeline", tasks)
    agent = await world.agent()
    for _ in tasks:
        await world.complete(await world.take(agent), {"table": "sales"})
    await EventWatcher(engine.event_sources).run_once()

    (firing,) = (await engine.sources.firings("report")).items
    dag = await engine.read.dag(str(firing.dag_id))
    assert (dag.title, dag.created_by) == (f"Report of {pipeline.id}", "dag:report")
    assert (await engine.read.task(dag.roots[0])).spec == {"tables": ["sales"]}

    ids = [await world.one("auth", max_attempts=1) for _ in range(10)]
    for n, task in enumerate(await world.claim(agent, limit=10, types=["auth"])):
        await (world.fail(task, f"session {n} is invalid") if n < 4 else world.complete(task))
    await Observer(engine.observers).run_once()

    (firing,) = (await engine.sources.firings("friction")).items
    refactor = await engine.read.task(firing.task_ids[0])
    assert (refactor.title, refactor.created_by) == ("auth fails in 4 of 10 attempts", "system:friction")
    (group,) = refactor.spec["errors"]
    assert (group["pattern"], group["count"]) == ("session <n> is invalid", 4)
    assert set(refactor.spec["task_ids"]) < set(ids)


def test_every_definition_of_the_page_is_valid(tmp_path: Path) -> None:
    names = []
    for block in blocks(PAGE):
        if block.language == "yaml" and block.is_file:
            path = tmp_path / "sources.yaml"
            path.write_text(block.text)
            names += [source.name for source in file.read(path)]
    assert sorted(names) == ["broken-builds", "friction", "monthly", "report", "reviews", "slack"]
