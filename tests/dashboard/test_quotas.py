"""Quotas: what runs, what is used, who waits, and what an operator changes."""

from decimal import Decimal

import psycopg
import pytest

from lineshaft.engine.engine import Engine
from lineshaft.operations.quotas import NewRate, SetQuota
from lineshaft.types.reservations import NewReservation, Units
from tests.dashboard.conftest import Served
from tests.dashboard.forms import Person, text_of
from tests.dashboard.records import HOSTILE, check_act, check_harmless, live_part, reader_of
from tests.server.client import Client

FIELDS = {
    "name": "customers",
    "match": "customer:*",
    "keys": "each",
    "max_running": "3",
    "max_waiting": "",
    "amount": "2.5",
    "unit": "usd",
    "per_sec": "3600",
    "weight": "2",
}


@pytest.fixture
def engine(served: Served) -> Engine:
    return served.service.engine


async def _reserve(served: Served, key: str, tokens: int) -> str:
    """What a held task acquires; returns the task's id."""
    client: Client = served.client
    await client.submit("code")
    task_id, token = await client.hold(await client.register("coder"))
    tokens_of = await served.service.engine.claim_key.tokens()
    claim = tokens_of.find(task_id, token)
    assert claim is not None
    await served.service.engine.reservations.acquire(NewReservation(claim, key, Units(tokens=tokens)))
    return task_id


async def test_an_installation_without_quotas_says_so(served: Served) -> None:
    person = Person(served)
    seen = text_of(await person.page("/quotas"))
    assert "No quotas. A quota limits how many tasks with a key run at once" in seen
    assert "There is no quota 'unknown'" in text_of(await person.page("/quotas/unknown", 404))
    await person.page("/quotas/edit:unknown", 404)


async def test_a_quota_shows_who_uses_it(served: Served, engine: Engine) -> None:
    rate = NewRate(amount=1000, unit="tokens", per_sec=3600)
    await engine.quotas.set(SetQuota(name="models", match="model:*", rate=rate))
    await engine.quotas.set(SetQuota(name="all", match="model:*", each=False, max_running=5, max_waiting=7))
    task_id = await _reserve(served, "model:large", 250)
    person = Person(served)

    seen = text_of(await person.page("/quotas"))
    assert "all model:* shared 0 of 5 0 at most 7 no rate" in seen
    assert "models model:* 0 no limit 0 250 of 1,000 tokens in 1 h, the key that used most" in seen

    page = await person.page("/quotas/models")
    assert f"/tasks/{task_id}" in page
    seen = text_of(page)
    assert "model:* , each with limits of its own" in seen.replace("*,", "* ,")
    assert "model:large 0 0 250" in seen
    assert "No task holds a slot of it." in seen
    assert "model:large coder 250 1" in seen
    assert "No task waits for it." in seen
    assert "event: gone" not in await live_part(served, person, page)


async def test_quotas_are_set_changed_and_deleted(
    served: Served, engine: Engine, connection: psycopg.Connection
) -> None:
    person = Person(served)
    await person.page("/quotas/edit:")
    seen = text_of(await person.act("/quotas/edit:", {**FIELDS, "reason": "a busy day"}))
    assert person.path == "/quotas/customers"
    assert "0 3 for each key" in seen
    check_act(connection, "quota.changed", "a busy day", name="customers")
    quota = (await engine.quotas.details("customers")).quota
    assert (quota.each, quota.max_running, quota.max_waiting, quota.weight) == (True, 3, None, 2)
    assert quota.rate is not None
    assert (quota.rate.amount, quota.rate.unit, quota.rate.per_sec) == (Decimal("2.5"), "usd", 3600)

    form = await person.page("/quotas/edit:customers")
    for value in ('value="customer:*"', 'value="2.5"', 'value="3600"', "<option selected>usd</option>"):
        assert value in form
    await person.act("/quotas/edit:customers", {**FIELDS, "keys": "shared", "max_running": "0"})
    quota = (await engine.quotas.details("customers")).quota
    assert (quota.each, quota.max_running) == (False, 0)

    assert "was deleted" in await person.act("/quotas/delete:customers", {"reason": "over"})
    check_act(connection, "quota.changed", "over", name="customers", deleted=True)
    assert "it was deleted already" in await person.act("/quotas/delete:customers")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "a b"),
        ("match", ""),
        ("match", "customer*"),
        ("max_running", "few"),
        ("max_running", "1.5"),
        ("max_waiting", "-1"),
        ("amount", ""),
        ("amount", "0"),
        ("per_sec", ""),
        ("per_sec", "0"),
        ("unit", "apples"),
        ("weight", "0"),
    ],
)
async def test_what_was_entered_survives_a_refusal(
    served: Served, engine: Engine, field: str, value: str
) -> None:
    person = Person(served)
    await person.page("/quotas/edit:")
    refused = await person.submit("/quotas/edit:", {**FIELDS, field: value, "reason": "typing"})
    assert refused.status == 422
    page = refused.body.decode()
    assert field in text_of(page)
    assert 'value="typing"' in page
    assert (await engine.quotas.page(limit=1, cursor=None)).items == []


async def test_a_reader_changes_nothing(served: Served, engine: Engine) -> None:
    await engine.quotas.set(SetQuota(name="customers", match="customer:*", max_running=3))
    person = await reader_of(served)
    for path in ("/quotas", "/quotas/customers"):
        page = await person.page(path)
        assert "/quotas/edit:" not in page
        assert "/quotas/delete:" not in page
    await person.page("/quotas/edit:", 403)
    for address in ("/quotas/edit:customers", "/quotas/delete:customers"):
        assert (await person.submit(address, FIELDS)).status == 403
    assert (await person.submit("/quotas/delete:customers", csrf="forged")).status == 403
    assert len((await engine.quotas.page(limit=9, cursor=None)).items) == 1


async def test_hostile_keys_are_harmless(served: Served, engine: Engine) -> None:
    rate = NewRate(amount=1000, unit="tokens", per_sec=3600)
    await engine.quotas.set(SetQuota(name="x", match=HOSTILE.replace("*", ""), rate=rate))
    await _reserve(served, HOSTILE, 5)
    person = Person(served)
    for path in ("/quotas", "/quotas/x"):
        check_harmless(await person.page(path))
    # A form has what is edited as it is.
    assert "<script>alert" not in await person.page("/quotas/edit:x")
