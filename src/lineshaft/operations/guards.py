"""Guards: limits, breakers, locks, slowdowns, pauses."""

from decimal import Decimal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from lineshaft.model.fields import check_fields
from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Breaker, Limits, Lock, Page, Scope, Slowdown, VelocityAction
from lineshaft.types.request import Act, ActByKey, Name, Nothing, OnePage


@operation("GET /v1/limits", Scope.READ)
async def get_limits(engine: Engine, request: Nothing) -> Limits:  # noqa: ARG001 - it has no fields
    """Read the limits of the whole installation, and what was spent today. Null: no limit."""
    return await engine.limits.read()


class ChangeLimits(Act, frozen=True, kw_only=True):
    """Null: no limit."""

    daily_budget_usd: Decimal | float | UnsetType | None = UNSET
    velocity_usd: Decimal | float | UnsetType | None = UNSET
    velocity_window_sec: float | UnsetType = UNSET
    velocity_action: VelocityAction | UnsetType = UNSET
    default_max_cost_usd: Decimal | float | UnsetType | None = UNSET
    crash_cost_fraction: float | UnsetType = UNSET
    judge_max_cost_usd: Decimal | float | UnsetType = UNSET
    #: Limits that are no longer set by hand: what the settings of servers say counts again.
    from_settings: tuple[str, ...] = ()


@operation("PATCH /v1/limits", Scope.OPERATE, example={"daily_budget_usd": 100})
async def change_limits(engine: Engine, request: ChangeLimits) -> Limits:
    """Change limits of the whole installation. Every process obeys them from its next claim or heartbeat.

    A limit that was changed stays until it is named in `from_settings`.
    """
    changes = {name: value for name, value in asdict(request).items() if value is not UNSET}
    reason, from_settings = changes.pop("reason"), changes.pop("from_settings")
    return await engine.limits.patch(changes, from_settings=from_settings, reason=reason)


@operation("GET /v1/breakers", Scope.READ)
async def list_breakers(engine: Engine, request: OnePage) -> Page[Breaker]:
    """List circuit breakers that have counted a failure or were opened; all others are closed."""
    return await engine.read.breakers(limit=request.limit, cursor=request.cursor)


@operation("POST /v1/breakers/{key:path}/open", Scope.OPERATE, repeatable=True)
async def open_breaker(engine: Engine, request: ActByKey) -> Breaker:
    """Stop claims of this type, or of `model:NAME`, until the breaker is reset."""
    await engine.breakers.open(request.key, reason=request.reason)
    return await engine.read.breaker(request.key)


@operation("POST /v1/breakers/{key:path}/reset", Scope.OPERATE, repeatable=True)
async def reset_breaker(engine: Engine, request: ActByKey) -> Breaker:
    """Close a breaker and forget its failures."""
    await engine.breakers.reset(request.key, reason=request.reason)
    return await engine.read.breaker(request.key)


@operation("GET /v1/locks", Scope.READ)
async def list_locks(engine: Engine, request: OnePage) -> Page[Lock]:
    """List held document locks, one item for each holder, and how many tasks wait for each lock."""
    return await engine.read.locks(limit=request.limit, cursor=request.cursor)


@operation("DELETE /v1/locks/{key:path}", Scope.OPERATE, codes=("not_found",))
async def release_lock(engine: Engine, request: ActByKey) -> None:
    """Take a lock from its holder, or from all that share it; the next waiter gets it.

    The old holder can't complete: it gets 409 `stale_claim`, and `lost` at its next heartbeat.
    """
    await engine.locks.release(request.key, reason=request.reason)


@operation("GET /v1/slowdowns", Scope.READ)
async def list_slowdowns(engine: Engine, request: OnePage) -> Page[Slowdown]:
    """List current slowdowns after rate limits."""
    return await engine.read.slowdowns(limit=request.limit, cursor=request.cursor)


@operation("DELETE /v1/slowdowns/{key:path}", Scope.OPERATE, codes=("not_found",))
async def end_slowdown(engine: Engine, request: ActByKey) -> None:
    """End a slowdown at once: `model:NAME` or `*`."""
    await engine.slowdowns.end(request.key, reason=request.reason)


class PauseOrResume(Act, frozen=True, kw_only=True):
    type: Name | None = None

    def check(self) -> None:
        if self.type is not None:
            check_fields(type=self.type)


class Paused(Struct, frozen=True):
    #: Null: all types.
    type: str | None
    paused: bool


@operation("POST /v1/pause", Scope.OPERATE, repeatable=True, example={"type": "research"})
async def pause(engine: Engine, request: PauseOrResume) -> Paused:
    """Stop claims of a type, or all claims. Running tasks continue."""
    await engine.pauses.pause(request.type, reason=request.reason)
    return Paused(request.type, paused=True)


@operation("POST /v1/resume", Scope.OPERATE, repeatable=True, example={"type": "research"})
async def resume(engine: Engine, request: PauseOrResume) -> Paused:
    """End a pause. Without a pause, nothing changes."""
    await engine.pauses.resume(request.type, reason=request.reason)
    return Paused(request.type, paused=False)
