"""Reservations: acquired where every window has room, settled with what was used, ended with the claim."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError, NotFoundError, RateLimitedError, StaleClaimError
from lineshaft.operations.quotas import SetQuota
from lineshaft.types import Quota, Rate, RateUnit
from lineshaft.types.reservations import NewReservation, Settlement, Units, remaining_in
from lineshaft.types.work import ClaimedTask, ClaimRef
from tests.world import World, ref

KEY = "model:m"


async def limit(
    world: World, amount: float, unit: str = "tokens", *, match: str = KEY, per_sec: float = 60, **fields: Any
) -> Quota:
    rate = Rate(Decimal(str(amount)), RateUnit(unit), per_sec)
    request: dict[str, Any] = {"name": "q", "match": match, "rate": rate, **fields}
    return await world.engine.quotas.set(SetQuota(**request))


async def acquire(
    world: World, task: ClaimedTask, tokens: float | None = None, *, key: str = KEY, **more: Any
) -> str | None:
    waits = {name: more.pop(name) for name in ("wait_sec",) if name in more}
    idempotency_key = more.pop("idempotency_key", None)
    new = NewReservation(ref(task), key, Units(tokens=tokens, **more), idempotency_key)
    return await world.engine.reservations.acquire(new, **waits)


async def settle(
    world: World, task: ClaimedTask, reservation: str | None, remaining: Units | None = None, **units: Any
) -> None:
    settlement = Settlement(ref(task), reservation, Units(**units), remaining or Units())
    await world.engine.reservations.settle(settlement)


def used(world: World, quota: str = "q") -> float:
    query = "SELECT coalesce(sum(amount), 0) AS used FROM lineshaft.quota_use WHERE quota = %s"
    return float(world.row(query, quota)["used"])


async def running(world: World) -> ClaimedTask:
    await world.one()
    return await world.take()


async def test_a_window_has_no_more_than_its_amount(world: World) -> None:
    """What doesn't fit is refused with the instant at which it does, and is acquired then."""
    await limit(world, 1000)
    task = await running(world)
    assert await acquire(world, task, 600) is not None
    world.age(seconds=20)
    assert await acquire(world, task, 400) is not None

    with pytest.raises(
        RateLimitedError, match=r"500 tokens were asked for, .* 'q' allows 1000 in 60 s"
    ) as full:
        await acquire(world, task, 500)

    wait_sec = full.value.retry_after_sec
    assert wait_sec is not None
    assert 40 <= wait_sec <= 41.1
    world.age(seconds=wait_sec - 1.1)
    with pytest.raises(RateLimitedError):
        await acquire(world, task, 500)
    world.age(seconds=1.1)
    assert await acquire(world, task, 500) is not None


async def test_more_than_the_amount_is_never_acquired(world: World) -> None:
    await limit(world, 1000)
    task = await running(world)
    with pytest.raises(InvalidInputError, match=r"units.tokens: can never be acquired: 1001 tokens"):
        await acquire(world, task, 1001)
    assert await acquire(world, task, 1000) is not None


@pytest.mark.parametrize("quota", [None, {"max_running": 1}, {"max_running": 3, "match": "model:*"}], ids=str)
async def test_a_key_without_a_rate_is_acquired_without_a_row(
    world: World, quota: dict[str, Any] | None
) -> None:
    if quota is not None:
        await world.engine.quotas.set(SetQuota(**{"name": "q", "match": KEY} | quota))
    task = await running(world)
    assert await acquire(world, task, 10**9) is None
    await settle(world, task, None, tokens=5)
    assert world.rows("SELECT * FROM lineshaft.reservation") == []


async def test_every_quota_of_the_key_must_have_room(world: World) -> None:
    """None of them is booked unless all are; the last one to have room decides how long to wait."""
    await limit(world, 100, name="minute")
    await limit(world, 150, name="hour", per_sec=3600, match="model:*", each=False)
    await limit(world, 2, "requests", name="calls")
    task = await running(world)
    await acquire(world, task, 90)

    with pytest.raises(RateLimitedError, match="'hour' allows 150") as full:
        await acquire(world, task, 70)

    assert (full.value.retry_after_sec or 0) > 3500
    assert (used(world, "minute"), used(world, "hour"), used(world, "calls")) == (90, 90, 1)
    await acquire(world, task, 10)
    with pytest.raises(RateLimitedError, match=r"1 requests were asked for, .* 'calls' allows 2"):
        await acquire(world, task)


async def test_keys_have_limits_of_their_own_or_share_one(world: World) -> None:
    await limit(world, 100, match="customer:*", name="each")
    task = await running(world)
    assert await acquire(world, task, 100, key="customer:1")
    assert await acquire(world, task, 100, key="customer:2")
    await limit(world, 100, match="customer:*", name="all", each=False)
    assert await acquire(world, task, 60, key="customer:3")
    with pytest.raises(RateLimitedError, match="'all'"):
        await acquire(world, task, 60, key="customer:4")


async def test_what_was_used_replaces_what_was_reserved(world: World) -> None:
    """The last settlement counts; repeating one changes nothing."""
    await limit(world, 1000)
    task = await running(world)
    first = await acquire(world, task, 1000)
    for _ in range(2):
        await settle(world, task, first, tokens=400)
        assert used(world) == 400
    second = await acquire(world, task, 600)
    await settle(world, task, second, tokens=900)
    assert used(world) == 1300
    with pytest.raises(RateLimitedError):
        await acquire(world, task, 1)
    await settle(world, task, second, tokens=100)
    await settle(world, task, second)
    assert used(world) == 500


async def test_without_a_stated_amount_it_waits_until_some_is_left(world: World) -> None:
    await limit(world, 100)
    task = await running(world)
    unknown = await acquire(world, task)
    await settle(world, task, unknown, tokens=130)
    assert used(world) == 130
    with pytest.raises(RateLimitedError):
        await acquire(world, task)
    world.age(seconds=61.1)
    assert await acquire(world, task)


async def test_what_the_provider_has_left_bounds_the_quota(world: World) -> None:
    """Others use the provider's quota too: what it says it has left is all there is."""
    await limit(world, 1000)
    await limit(world, 50, "requests", name="calls")
    task = await running(world)
    reservation = await acquire(world, task, 100)
    left = remaining_in({"X-RateLimit-Remaining-Tokens": "250", "x-ratelimit-remaining-requests": "60"})

    for _ in range(2):
        await settle(world, task, reservation, left, tokens=80)
        assert (used(world), used(world, "calls")) == (750, 1)

    with pytest.raises(RateLimitedError):
        await acquire(world, task, 251)
    await acquire(world, task, 250)


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ({"x-ratelimit-remaining-tokens": "12"}, Units(tokens=Decimal(12))),
        ({"anthropic-ratelimit-requests-remaining": 3}, Units(requests=Decimal(3))),
        (
            {"anthropic-ratelimit-tokens-remaining": "7", "X-Ratelimit-Remaining-Tokens": "5"},
            Units(tokens=Decimal(5)),
        ),
        ({"x-ratelimit-remaining-tokens": "many", "x-ratelimit-remaining-requests": "-1"}, Units()),
        ({"x-ratelimit-remaining-tokens": "9" * 99, "retry-after": "3"}, Units()),
        ({}, Units()),
    ],
)
def test_headers_of_providers(headers: dict[str, Any], left: Units) -> None:
    assert remaining_in(headers) == left


@pytest.mark.parametrize("end", ["complete", "fail", "release", "expire"])
async def test_a_reservation_ends_with_its_claim(world: World, end: str) -> None:
    """It counts in full until it drops out of the window; its row is deleted."""
    await limit(world, 100)
    task = await running(world)
    reservation = await acquire(world, task, 80)
    match end:
        case "complete":
            await world.complete(task)
        case "fail":
            await world.fail(task)
        case "release":
            await world.release(task)
        case _:
            world.age(seconds=200)
            await world.engine.maintenance.reap(100)

    for call in (acquire(world, task, 1), settle(world, task, reservation, tokens=1)):
        with pytest.raises(StaleClaimError):
            await call
    assert used(world) == 80
    assert await world.engine.reservations.forget(100) == 1
    assert world.rows("SELECT * FROM lineshaft.reservation") == []
    other = await running(world)
    if end == "expire":
        assert await acquire(world, other, 100)
    else:
        with pytest.raises(RateLimitedError):
            await acquire(world, other, 21)
        assert await acquire(world, other, 20)


async def test_a_claim_settles_only_its_own(world: World) -> None:
    await limit(world, 100)
    one, two = await running(world), await running(world)
    reservation = await acquire(world, one, 10)
    for unknown in (reservation, "reservation_1"):
        with pytest.raises(NotFoundError, match="has no reservation"):
            await settle(world, two, unknown, tokens=0)
    with pytest.raises(StaleClaimError):
        await world.engine.reservations.settle(Settlement(ClaimRef(one.id, one.epoch + 1), reservation))
    with pytest.raises(NotFoundError, match="There is no task"):
        await world.engine.reservations.acquire(NewReservation(ClaimRef("task_x", 1), KEY))


async def test_a_repeated_call_gets_the_same_reservation(world: World) -> None:
    await limit(world, 100)
    task = await running(world)
    first = await acquire(world, task, 60, idempotency_key="a")
    assert await acquire(world, task, 60, idempotency_key="a") == first
    assert used(world) == 60
    assert await acquire(world, task, 40, idempotency_key="b") not in {first, None}


async def test_a_changed_rate_doesnt_settle_in_other_parts(world: World) -> None:
    await limit(world, 100)
    task = await running(world)
    reservation = await acquire(world, task, 60)
    await limit(world, 100, per_sec=3600)
    await settle(world, task, reservation, tokens=0)
    await world.engine.quotas.delete("q")
    await settle(world, task, reservation, tokens=0)


async def test_a_call_waits_for_room_and_uses_no_connection(world: World) -> None:
    """Those who wait for a key take turns: a small reservation doesn't pass a large one."""
    await limit(world, 100)
    task = await running(world)
    first = await acquire(world, task, 100)
    order: list[str] = []

    async def waiting(name: str, tokens: float) -> None:
        await acquire(world, task, tokens, wait_sec=60)
        order.append(name)

    large = asyncio.create_task(waiting("large", 90))
    await asyncio.sleep(0)
    small = asyncio.create_task(waiting("small", 10))
    await asyncio.sleep(0)
    await settle(world, task, first, tokens=50)
    assert await acquire(world, task, 10) is not None
    assert order == []
    await settle(world, task, first, tokens=0)
    await large
    await settle(world, task, first, tokens=0)
    world.age(seconds=62)
    await small
    assert order == ["large", "small"]


async def test_a_wait_ends_in_time(world: World) -> None:
    await limit(world, 100)
    task = await running(world)
    await acquire(world, task, 100)
    with pytest.raises(RateLimitedError):
        await acquire(world, task, 100, wait_sec=0.01)


@pytest.mark.parametrize(
    ("key", "units"),
    [
        ("", {}),
        ("x" * 2000, {}),
        ("k\0", {}),
        ("k", {"tokens": -1}),
        ("k", {"usd": 1e13}),
        ("k", {"requests": float("nan")}),
    ],
)
async def test_invalid_reservations_are_refused(key: str, units: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        NewReservation(ClaimRef("task_1", 1), key, Units(**units))


@pytest.mark.parametrize("seed", range(6))
async def test_no_window_has_more_than_the_amount_whatever_happens(world: World, seed: int) -> None:
    """Random reservations and settlements, by a clock that moves; what is refused wouldn't have fitted."""
    random = Random(seed)
    amount, per_sec = random.choice([(10, 60.0), (100, 3.0), (1000, 3600.0)])
    await limit(world, amount, per_sec=per_sec)
    task = await running(world)
    #: When, the id, and what counts.
    booked: list[tuple[datetime, str, int]] = []

    def total(window_sec: float) -> int:
        since = world.clock.now() - timedelta(seconds=window_sec)
        return sum(tokens for at, _, tokens in booked if at > since)

    for _ in range(60):
        world.age(seconds=random.choice([0, 0, per_sec * random.random() / 10, per_sec * random.random()]))
        if booked and random.random() < 0.4:
            place = random.randrange(len(booked))
            at, reservation, tokens = booked[place]
            booked[place] = (at, reservation, random.randint(0, tokens))
            await settle(world, task, reservation, tokens=booked[place][2])
            continue
        tokens = random.randint(1, amount)
        try:
            reservation = str(await acquire(world, task, tokens))
        except RateLimitedError as error:
            assert total(per_sec * 61 / 60) + tokens > amount
            if random.random() < 0.5:
                world.age(seconds=error.retry_after_sec or 0)
                booked.append((world.clock.now(), str(await acquire(world, task, tokens)), tokens))
        else:
            booked.append((world.clock.now(), reservation, tokens))
        assert total(per_sec) <= amount
