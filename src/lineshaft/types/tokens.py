"""Bearer tokens of the HTTP API."""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from msgspec import Struct


class Scope(StrEnum):
    """What a token may do. Each scope includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    AGENT = "agent"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: "Scope") -> bool:
        return _ORDER[self] >= _ORDER[other]


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
