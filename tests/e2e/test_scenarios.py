"""What the documents promise, from end to end: real servers, real agents, and some of them are killed."""

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from lineshaft.engine.claim.claim_tokens import ClaimTokens
from tests.e2e.conftest import Site
from tests.server.client import Client

#: On one worker, with one set of processes.
pytestmark = pytest.mark.slow("two servers and six processes of agents")

AT_ONCE = {"strategy": "immediate"}
#: Leases of more than a minute, however often the agent sends heartbeats: a busy machine loses none of them.
LONG_LEASE = {"heartbeat_interval_sec": 30}
#: Everything comes within this, however busy the machine is.
PATIENCE = 60


async def happens(client: Client, kind: str, **about: str) -> dict[str, Any]:
    """The event, as soon as there is one."""
    page = (await client.get("/v1/events", kind=kind, limit=1, **about)).json
    if page["items"]:
        found: dict[str, Any] = page["items"][0]
        return found
    async with (
        asyncio.timeout(PATIENCE),
        client.stream(kind=kind, after=page["next_cursor"], **about) as stream,
    ):
        return dict(await stream.event())


async def ended(client: Client, task_id: str, kind: str = "task.completed") -> dict[str, Any]:
    await happens(client, kind, task_id=task_id)
    return await client.task(task_id)


async def story(client: Client, **about: str) -> list[tuple[str, str]]:
    """Kinds and tasks, in order."""
    items = (await client.get("/v1/events", limit=500, **about)).json["items"]
    return [(item["kind"], item["task_id"]) for item in items]


async def expire_lease(site: Site, task_id: str, agent_id: str) -> None:
    """End the lease of an agent that is dead or frozen, and wait until the task has been taken from it."""
    held = "WHERE id = %s AND agent_id = %s AND status = 'RUNNING'"
    with psycopg.connect(site.dsn, autocommit=True) as own:
        claim = own.execute(f"SELECT epoch FROM lineshaft.task_live {held}", [task_id, agent_id]).fetchone()
        if claim is None:
            return
        expire = f"UPDATE lineshaft.task_live SET lease_until = now() - interval '1 s' {held} AND epoch = %s"
        async with asyncio.timeout(PATIENCE):
            # Repeated: its last heartbeat may still be on its way.
            while own.execute(expire, [task_id, agent_id, *claim]).rowcount:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.05)


async def test_children_in_order_on_one_document(site: Site) -> None:
    """R-190 to R-192, R-196, R-205: nothing gets between the children of a batch."""
    client = site.client
    echo = [{"taskType": "echo", "payload": {"n": n}} for n in range(3)]
    batch = {"taskType": "batch_edit", "documentId": "d", "children": echo}
    others = [{"taskType": "echo", "documentId": "d", "priority": "CRITICAL"} for _ in range(3)]
    replies = await asyncio.gather(*(client.post("/api/tasks", body) for body in (batch, *others)))
    parent, *rivals = [reply.json["id"] for reply in replies]

    done = await ended(client, parent)
    for rival in rivals:
        await ended(client, rival)

    assert [part["spec"]["n"] for part in done["output"]["data"]] == [0, 1, 2]
    children = [task["id"] for task in (await client.get("/v1/tasks", parent_id=parent)).json["items"]]
    moves = [
        (kind, task_id)
        for kind, task_id in await story(client)
        if kind in {"task.started", "task.completed"} and task_id in {*children, *rivals}
    ]
    begins, ends = moves[::2], moves[1::2]
    assert [task_id for _, task_id in begins] == [task_id for _, task_id in ends], "one at a time"
    assert {kind for kind, _ in begins} == {"task.started"}
    order = [task_id in children for _, task_id in begins]
    first = order.index(True)
    assert order[first : first + 3] == [True] * 3, "all children without a break"


async def test_a_diamond(site: Site) -> None:
    """R-031, R-092, R-008, U7: the last one waits for both sides, and gets what they made."""
    client = site.client
    refs = ["task:left:output", "task:right:output"]
    body = {
        "title": "Diamond",
        "tasks": [
            {"key": "top", "type": "echo"},
            {"key": "left", "type": "echo", "spec": {"side": "left"}, "depends_on": ["top"]},
            {"key": "right", "type": "echo", "spec": {"side": "right"}, "depends_on": ["top"]},
            {"key": "bottom", "type": "echo", "spec": {"context_refs": refs}},
        ],
    }
    made = (await client.post("/v1/dags", body)).json
    ids = made["tasks"]

    await happens(client, "dag.completed", dag_id=made["dag"]["id"])

    tasks = {key: await client.task(name) for key, name in ids.items()}
    inputs = tasks["bottom"]["output"]["data"]["inputs"]
    assert sorted(value["spec"]["side"] for value in inputs.values()) == ["left", "right"]
    moves = await story(client, dag_id=made["dag"]["id"])
    for before, after in (("top", "left"), ("top", "right"), ("left", "bottom"), ("right", "bottom")):
        # Not their times: a transaction has that of its beginning.
        assert moves.index(("task.completed", ids[before])) < moves.index(("task.started", ids[after]))
    seen = [kind for kind, _ in moves if kind.startswith("dag.")]
    assert seen == ["dag.created", "dag.running", "dag.completed"]


async def test_a_crash(site: Site) -> None:
    """R-072, R-082: kill -9, and another agent carries on after the last step."""
    client = site.client
    task = await client.submit("crash", retry=AT_ONCE, **LONG_LEASE)
    site.hear("crasher", "half done")

    site.send("crasher", signal.SIGKILL)
    await expire_lease(site, task["id"], "crasher")

    rescuer = await client.register("rescuer")
    (item,) = await client.claim(rescuer, types=["crash"], wait_sec=60)
    assert (item["resume"], item["steps"]) == (True, {"half": "crasher"})
    assert item["last_error"]["category"] == "crash"
    path, token = f"/v1/tasks/{task['id']}", {"claim_token": item["claim_token"]}
    await client.post(f"{path}/start", token)
    done = await client.post(f"{path}/complete", {**token, "output": {"data": "rescued"}})
    assert (done.json["status"], done.json["attempts"]) == ("COMPLETED", 1)
    (failure,) = done.json["failure_history"]
    assert (failure["agent"], failure["error"]) == ("crasher", "heartbeat_timeout")


def token_of(site: Site, task_id: str, epoch: int) -> str:
    """The claim token that the agent of a running task has."""
    with psycopg.connect(site.dsn) as own:
        row = own.execute(
            "SELECT key, claimed_at FROM lineshaft.claim_key, lineshaft.task_live WHERE id = %s", [task_id]
        ).fetchone()
    assert row is not None
    claimed: Any = SimpleNamespace(id=task_id, epoch=epoch, claimed_at=row[1])
    return ClaimTokens(bytes(row[0])).issue(claimed)


async def test_a_zombie(site: Site) -> None:
    """R-100, F-30: an agent that was frozen wakes up, finds its claim gone, and spoils nothing."""
    client = site.client
    task = await client.submit("frozen", retry=AT_ONCE, **LONG_LEASE)
    site.hear("sleeper", "half done")
    (held,) = (await client.get("/v1/tasks", agent_id="sleeper", status="RUNNING")).json["items"]
    stale = token_of(site, task["id"], held["claim"]["epoch"])

    site.send("sleeper", signal.SIGSTOP)
    rescuer = await client.register("rescuer 2")
    claim = asyncio.create_task(client.claim(rescuer | {"id": "rescuer%202"}, types=["frozen"], wait_sec=60))
    while not claim.done():
        # Not only once: the call in which the sleeper waits for more work may get the task first.
        await expire_lease(site, task["id"], "sleeper")
        await asyncio.wait({claim}, timeout=0.05)
    (item,) = await claim
    path, token = f"/v1/tasks/{task['id']}", {"claim_token": item["claim_token"]}
    await client.post(f"{path}/start", token)
    late = await client.post(f"{path}/complete", {"claim_token": stale, "output": {"data": "late"}})
    assert (late.status, late.code) == (409, "stale_claim")
    done = await client.post(f"{path}/complete", {**token, "output": {"data": "in time"}})
    assert done.json["status"] == "COMPLETED"
    site.send("sleeper", signal.SIGCONT)

    await asyncio.to_thread(site.hear, "sleeper", "stopped")
    quick = await client.submit("frozen", spec={"quick": True})
    assert (await ended(client, quick["id"]))["output"]["data"] == "sleeper", "and it goes on working"
    assert (await client.task(task["id"]))["output"]["data"] == "in time"
    assert ("task.late_result", task["id"]) in await story(client, task_id=task["id"])


async def test_a_breaker_lets_one_probe_through(site: Site) -> None:
    """R-181, R-184, R-185, R-188, F-1."""
    client = site.client
    broken = [await client.submit("fragile", spec={"breaks": True}, max_attempts=1) for _ in range(2)]
    for task in broken:
        await ended(client, task["id"], "task.dead_lettered")
    good = await asyncio.gather(*(client.submit("fragile", spec={"breaks": False}) for _ in range(4)))

    for task in good:
        assert (await ended(client, task["id"]))["attempts"] == 0

    names = {task["id"] for task in good}
    seen = [
        kind
        for kind, task_id in await story(client)
        if kind.startswith("breaker.") or (kind in {"task.claimed", "task.completed"} and task_id in names)
    ]
    assert seen[0] == "breaker.opened"
    assert seen.index("task.claimed") == seen.index("breaker.half_open") - 1 or seen[1] == "breaker.half_open"
    closed = seen.index("breaker.closed")
    assert seen[:closed].count("task.claimed") == 1, "one probe, and nothing beside it"
    assert seen[closed:].count("task.completed") >= 3
    (breaker,) = (b for b in (await client.get("/v1/breakers")).json["items"] if b["key"] == "fragile")
    assert (breaker["state"], breaker["failures"]) == ("closed", 0)


async def test_a_poison_pill(site: Site) -> None:
    """R-136, F-26: it kills every agent that claims it; after three it is a dead letter, attempts left."""
    client = site.client
    task = await client.submit("poison", max_attempts=9, retry=AT_ONCE, **LONG_LEASE)
    waits = {
        asyncio.create_task(asyncio.to_thread(site.fleet[name].wait, PATIENCE), name=name)
        for name in ("victim-1", "victim-2", "victim-3")
    }
    while waits:
        died, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for victim in died:
            assert victim.result() == 9
            await expire_lease(site, task["id"], victim.get_name())

    dead = await ended(client, task["id"], "task.dead_lettered")

    assert (dead["status"], dead["attempts"]) == ("DEAD_LETTERED", 3)
    letter = (await client.get(f"/v1/dead-letters/{task['id']}")).json
    assert letter["poison_pill"] is True
    assert {failure["agent"] for failure in letter["failure_history"]} == {f"victim-{n}" for n in (1, 2, 3)}


async def test_a_race_for_the_last_money(site: Site) -> None:
    """R-232, R-234, F-27: a dollar, six tasks for up to 40 cents, six agents at two servers, all at once."""
    client = site.client
    tasks = [{"key": f"{n}", "type": "paid", "max_cost_usd": 0.4} for n in range(6)]
    body = {"title": "Paid", "budget_ceiling_usd": 1, "tasks": tasks}
    dag_id = (await client.post("/v1/dags", body)).json["dag"]["id"]
    agents = await asyncio.gather(*(client.register(f"payer-{n}") for n in range(6)))

    async def round_of_claims() -> int:
        claims = [site.clients[n % 2].claim(agent, types=["paid"]) for n, agent in enumerate(agents)]
        held = [item for items in await asyncio.gather(*claims) for item in items]
        dag = (await client.get(f"/v1/dags/{dag_id}")).json
        assert dag["reserved_usd"] == pytest.approx(0.4 * len(held))
        assert dag["reserved_usd"] + dag["spent_usd"] <= 1
        for item in held:
            path, token = f"/v1/tasks/{item['task']['id']}", {"claim_token": item["claim_token"]}
            await client.post(f"{path}/start", token)
            done = await client.post(f"{path}/complete", {**token, "cost_usd": 0.1})
            assert done.json["status"] == "COMPLETED"
        return len(held)

    # 0.2, 0.4, 0.5 and 0.6 dollars are spent then.
    assert [await round_of_claims() for _ in range(4)] == [2, 2, 1, 1]
    dag = (await client.get(f"/v1/dags/{dag_id}")).json
    assert (dag["status"], dag["spent_usd"], dag["reserved_usd"]) == ("completed", 0.6, 0)


async def test_spawn_and_wait(site: Site) -> None:
    """R-145: the parent frees its slot, and comes back with what became of its children."""
    client = site.client
    task = await client.submit("divide")

    done = await ended(client, task["id"])

    assert (done["output"]["data"], done["attempts"]) == ([0, 1, 2], 0)
    kinds = [kind for kind, _ in await story(client, task_id=task["id"])]
    assert kinds.count("task.claimed") == 2
    assert "task.waiting" in kinds


async def test_a_rate_limit(site: Site) -> None:
    """R-210, R-218, U13: it slows the model down, and uses no attempt."""
    client = site.client
    task = await client.submit("limited", max_attempts=1)

    seen = await happens(client, "signal.slowdown")
    done = await ended(client, task["id"])

    assert seen
    assert (done["output"]["data"], done["attempts"]) == ("served", 0)
    outcomes = [a["outcome"] for a in (await client.get(f"/v1/tasks/{task['id']}/attempts")).json["items"]]
    assert outcomes == ["rate_limited", "completed"]


async def test_a_cancellation_that_cascades(site: Site) -> None:
    """R-172, R-173, R-175: its agent is notified, and its dependents are cancelled too."""
    client = site.client
    tasks = [
        {"key": "a", "type": "frozen", **LONG_LEASE},
        {"key": "b", "type": "echo", "depends_on": ["a"]},
        {"key": "c", "type": "echo", "depends_on": ["b"]},
    ]
    made = (await client.post("/v1/dags", {"title": "Cascade", "tasks": tasks})).json
    a, b, c = (made["tasks"][key] for key in "abc")
    await asyncio.to_thread(site.hear, "sleeper", "half done")

    await site.clients[1].post(f"/v1/tasks/{a}/cancel", {"reason": "no longer needed"})

    await asyncio.to_thread(site.hear, "sleeper", "stopped")
    reasons = [(await client.task(name))["cancel_reason"] for name in (a, b, c)]
    assert reasons == ["no longer needed", f"Parent {a} cancelled", f"Parent {b} cancelled"]
    assert (await client.get(f"/v1/dags/{made['dag']['id']}")).json["status"] == "cancelled"


async def test_one_submission_made_twenty_times_at_once(site: Site) -> None:
    """R-170, U8: at two servers."""
    body = {"type": "unclaimed", "spec": {"n": 1}}
    headers = {"Idempotency-Key": "only once"}
    calls = [site.clients[n % 2].post("/v1/tasks", body, headers=headers) for n in range(20)]

    replies = await asyncio.gather(*calls)

    assert sorted(reply.status for reply in replies) == [200] * 19 + [201]
    assert len({reply.json["id"] for reply in replies}) == 1
    assert [reply.status for reply in replies if "duplicate" not in reply.json] == [201]
