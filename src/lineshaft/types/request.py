"""What requests have in common: their base, and the texts and numbers in them."""

from typing import Annotated

from msgspec import Meta, Struct

from lineshaft.types.page import DEFAULT_LIMIT, MAX_LIMIT, check_limit

#: Characters of a reason.
MAX_REASON = 2_000

Name = Annotated[str, Meta(min_length=1, max_length=1_000)]
Text = Annotated[str, Meta(max_length=10_000)]
Seconds = Annotated[float, Meta(ge=0, le=365 * 86_400)]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown fields are refused, so that a misspelt one is never ignored."""

    def check(self) -> None:
        """Refuse, before it is sent to a server, what the engine would refuse, in the engine's words."""


class Nothing(Request, frozen=True, kw_only=True):
    pass


class ById(Request, frozen=True, kw_only=True):
    id: str


class Act(Request, frozen=True, kw_only=True):
    #: The person's, for the event.
    reason: Reason | None = None


class ActById(Act, frozen=True, kw_only=True):
    id: str


class ActByKey(Act, frozen=True, kw_only=True):
    key: str


class OnePage(Request, frozen=True, kw_only=True):
    limit: Limit = DEFAULT_LIMIT
    cursor: str | None = None

    def check(self) -> None:
        check_limit(self.limit)
