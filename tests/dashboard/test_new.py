"""New: tasks, DAGs and goals, and whether they can run."""

import json

from tests.dashboard.conftest import Served
from tests.dashboard.forms import NAME, Person, text_of

_DAG = """\
title: Report
tasks:
  - {key: a, type: research, title: "Find <b>sources</b>"}
  - {key: b, type: write, depends_on: [a], max_cost_usd: 0.5}
"""


async def _agent(served: Served, **fields: object) -> None:
    reply = await served.client.post("/v1/agents", {"id": "worker", **fields})
    assert reply.status in {200, 201}, reply


async def test_a_task_is_checked_and_then_submitted(served: Served) -> None:
    person = Person(served)
    await person.page("/new")
    given = {
        "type": "write",
        "title": "Write it",
        "spec": '{"topic": "cats"}',
        "priority": "3",
        "tags": "a, b",
    }

    checked = await person.submit("/new/check", given)
    assert "no agent is active" in text_of(checked.body.decode())
    await _agent(served, types=["write"])
    checked = await person.submit("/new/check", given)
    assert "It can run." in text_of(checked.body.decode())
    assert (await served.client.get("/v1/tasks")).json["items"] == []
    page = text_of(await person.act("/new", given))

    assert "The task is submitted" in page
    (task,) = (await served.client.get("/v1/tasks")).json["items"]
    assert (task["type"], task["spec"], task["priority"], task["tags"]) == (
        "write",
        {"topic": "cats"},
        3,
        ["a", "b"],
    )
    assert task["created_by"] == f"human:{NAME}"


async def test_what_was_entered_is_kept_when_it_is_refused(served: Served) -> None:
    person = Person(served)
    await person.page("/new")

    for fields, fault in (
        ({"type": ""}, "type is missing"),
        ({"type": "x", "spec": "{"}, "spec is not valid JSON"),
        ({"type": "x", "spec": "[]"}, "spec"),
        ({"type": "x", "priority": "many"}, "priority must be a number"),
        ({"type": "x", "deadline": "soon"}, "deadline must be a time"),
        ({"type": "x", "max_cost_usd": "-1"}, "max_cost_usd"),
        ({"type": "x", "output": '{"validation": "nonsense"}'}, "output"),
        ({"type": "x", "depends_on": "unknown"}, "unknown"),
    ):
        reply = await person.submit("/new", {"title": "Kept as it was", **fields})
        page = reply.body.decode()
        assert reply.status == 422, (fields, reply)
        assert fault in text_of(page), (fields, text_of(page)[:500])
        assert 'value="Kept as it was"' in page
    assert (await served.client.get("/v1/tasks")).json["items"] == []


async def test_a_dag_is_shown_before_it_is_submitted(served: Served) -> None:
    await _agent(served, types=["research"])
    person = Person(served)
    await person.page("/new/dag")

    checked = (await person.submit("/new/dag/check", {"document": _DAG})).body.decode()
    assert "1 task would wait" in text_of(checked)
    assert "no active agent takes type 'write'" in text_of(checked)
    assert checked.count('class="node ') == 2
    assert "Find <b>" not in checked
    page = text_of(await person.act("/new/dag", {"document": _DAG}))

    assert "The DAG is submitted" in page
    assert person.path.startswith("/dags/dag_")
    same = json.dumps({"title": "Report", "tasks": [{"key": "a", "type": "x"}], "idempotency_key": "once"})
    await person.act("/new/dag", {"document": same})
    assert "exists already" in await person.act("/new/dag", {"document": same})


async def test_a_wrong_dag_creates_nothing(served: Served) -> None:
    person = Person(served)
    await person.page("/new/dag")

    for document, fault in (
        ("", "must be a DAG"),
        ("just text", "must be a DAG"),
        ("title: [", "neither JSON nor YAML"),
        ("title: x\ntasks: []", "tasks"),
        (
            "title: x\ntasks: [{key: a, type: t, depends_on: [b]}, {key: b, type: t, depends_on: [a]}]",
            "cycle",
        ),
        ("title: x\ntasks: [{key: a, type: t, unknown: 1}]", "unknown"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{c}: &{c} [{','.join([f'*{p}'] * 10)}]\n" for p, c in zip("abcdef", "bcdefg", strict=True)
            ),
            "aliases",
        ),
    ):
        for path in ("/new/dag", "/new/dag/check"):
            reply = await person.submit(path, {"document": document})
            assert reply.status == 422, (document, reply)
            assert fault in text_of(reply.body.decode()), (document, text_of(reply.body.decode())[:600])
    assert (await served.client.get("/v1/dags")).json["items"] == []


async def test_a_goal_says_when_nothing_can_take_it(served: Served) -> None:
    person = Person(served)
    assert "No active agent takes tasks of type goal" in text_of(await person.page("/new/goal"))
    await _agent(served, types=["goal"])
    assert "No active agent" not in text_of(await person.page("/new/goal"))

    assert (await person.submit("/new/goal", {"goal": "  "})).status == 422
    await person.act(
        "/new/goal", {"goal": "Build a landing page", "budget_usd": "5", "max_tasks": "10", "approve": "yes"}
    )

    (task,) = (await served.client.get("/v1/tasks")).json["items"]
    assert task["type"] == "goal"
    assert task["spec"] == {
        "goal": "Build a landing page",
        "budget_usd": 5.0,
        "max_tasks": 10,
        "approve": True,
    }
