"""Responses that are not one of `lineshaft.types`."""

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType

from lineshaft.types import Dag, Submitted


class SubmittedItems(Struct, frozen=True):
    items: list[Submitted]


class SubmittedDag(Struct, frozen=True):
    dag: Dag
    #: By the keys of the request.
    tasks: dict[str, str]
    #: The same, with whether each task existed before.
    submitted: Mapping[str, Submitted]
    duplicate: bool | UnsetType = UNSET


class Paused(Struct, frozen=True):
    #: Null: all types.
    type: str | None
    paused: bool


class Health(Struct, frozen=True):
    status: str
    version: str


class FoundIds(Struct, frozen=True):
    ids: list[str]


class Ended(Struct, frozen=True):
    #: By id: `open`, or ended as a `task` or as a `dag`, or `unknown`.
    ids: dict[str, str]
