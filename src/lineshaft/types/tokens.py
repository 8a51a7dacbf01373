"""Bearer tokens of the HTTP API."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct, field

from lineshaft.model.open_enum import OpenEnum


class Scope(OpenEnum):
    """What a token may do. Each scope includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    AGENT = "agent"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: "Scope") -> bool:
        # A scope that this version doesn't know includes nothing, not even itself.
        return other in _ORDER and _ORDER.get(self, -1) >= _ORDER[other]


_ORDER = {scope: place for place, scope in enumerate(Scope)}


class Token(Struct, frozen=True):
    """A token without its secret."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    revoked_at: datetime | None
    #: The only agent that it may act as; None: any.
    agent_id: str | None = None
    #: The budget of that agent; None: what it declares.
    budget_usd: Decimal | None = None
    #: Sources that it last put or changed and that aren't paused, up to 100; only in lists.
    sources: list[str] = field(default_factory=list)


class NewToken(Struct, frozen=True, omit_defaults=True):
    """A token with its secret, which is shown only once."""

    id: str
    name: str
    scope: Scope
    token: str
    #: The only agent that it may act as; None: any.
    agent_id: str | None = None
    #: The budget of that agent; None: what it declares.
    budget_usd: Decimal | None = None
