"""Bearer tokens of the HTTP API."""

from datetime import datetime
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
        order = list(Scope)
        return order.index(self) >= order.index(other)


class Token(Struct, frozen=True):
    """A token without its secret."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    revoked_at: datetime | None


class NewToken(Struct, frozen=True):
    """A token with its secret, which is shown only once."""

    id: str
    name: str
    scope: Scope
    token: str
