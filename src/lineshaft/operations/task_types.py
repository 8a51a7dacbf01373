"""Task types: defaults of their tasks."""

from decimal import Decimal
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from lineshaft.model.fields import check_fields
from lineshaft.model.tasks import RetrySpec
from lineshaft.operations.operation import Engine, operation
from lineshaft.types import Page, Scope, TypeInfo
from lineshaft.types.request import Act, OnePage, Request


@operation("GET /v1/types", Scope.READ)
async def list_types(engine: Engine, request: OnePage) -> Page[TypeInfo]:
    """List task types by name: defaults of their tasks, where each comes from, and who serves it."""
    return await engine.task_types.page(limit=request.limit, cursor=request.cursor)


class ByType(Request, frozen=True, kw_only=True):
    type: str


@operation("GET /v1/types/{type:path}", Scope.READ, codes=("not_found",))
async def get_type(engine: Engine, request: ByType) -> TypeInfo:
    """Read a task type."""
    return await engine.task_types.read(request.type)


class SetType(Act, frozen=True, kw_only=True):
    """Null: as agents declare it."""

    type: str
    max_cost_usd: Decimal | float | UnsetType | None = UNSET
    max_attempts: int | UnsetType | None = UNSET
    max_duration_sec: float | UnsetType | None = UNSET
    retry: RetrySpec | UnsetType | None = UNSET
    parameters_schema: dict[str, Any] | UnsetType | None = UNSET
    result_schema: dict[str, Any] | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET

    def check(self) -> None:
        check_fields(type=self.type)


@operation(
    "PUT /v1/types/{type:path}",
    Scope.OPERATE,
    repeatable=True,
    codes=("not_found",),
    example={"max_cost_usd": 0.5},
)
async def set_type(engine: Engine, request: SetType) -> TypeInfo:
    """Set defaults of a type by hand.

    They win over what agents declare; null returns to that. They apply to new tasks that leave the field out,
    and to waiting ones that did.
    """
    changes = asdict(request)
    return await engine.task_types.set(changes.pop("type"), changes, reason=changes.pop("reason"))
