"""Responses that programs see in another form; all others are decoded into `lineshaft.types`."""

from msgspec import Struct

from lineshaft.types import Dag, Submitted, SubmittedDag


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


class FoundIds(Struct, frozen=True):
    ids: list[str]


class Ended(Struct, frozen=True):
    ids: dict[str, str]
