"""Responses that programs see in another form; all others are decoded into `lineshaft.types`."""

from msgspec import Struct

from lineshaft.model.states import Status
from lineshaft.types import Dag, Problem, Submitted, SubmittedDag
from lineshaft.types.work import Moved


class Items(Struct, frozen=True):
    items: list[Submitted]


class NewDag(Struct, frozen=True):
    dag: Dag
    #: By the keys of the request.
    submitted: dict[str, Submitted]
    duplicate: bool = False

    @property
    def value(self) -> SubmittedDag:
        return SubmittedDag(self.dag.id, self.submitted, self.duplicate)


class Ended(Struct, frozen=True):
    ids: dict[str, str]


class _Moved(Struct, frozen=True):
    id: str
    status: Status | None
    error: Problem | None

    @property
    def value(self) -> Moved:
        return Moved(self.id, self.status, None if self.error is None else self.error.exception)


class MovedItems(Struct, frozen=True):
    items: list[_Moved]
