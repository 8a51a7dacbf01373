"""Who acts: the event of what a person or a token did by hand has the name as `actor`.

What agents do in the course of their work, and what duties do, has no actor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec

from lineshaft.errors import InvalidInputError
from lineshaft.model.storable import replace_unstorable

#: The name of the person or token of the current call; None: unknown, or no person acts.
acting: ContextVar[str | None] = ContextVar("acting", default=None)
#: Characters of a reason.
MAX_REASON = 2_000


@contextmanager
def acting_as(name: str | None) -> Iterator[None]:
    """Acts within the block have this actor; None: they have none."""
    before = acting.set(name)
    try:
        yield
    finally:
        acting.reset(before)


def actor_name() -> str | None:
    """Who acts, as it is stored; None: unknown, or no person acts."""
    name = acting.get()
    return None if name is None else replace_unstorable(name)


def with_actor(data: Mapping[str, Any] | None = None, reason: str | None = None) -> dict[str, Any]:
    """The data of an act's event, with the actor and the person's reason, if they are known."""
    found = dict(data or {})
    if (name := actor_name()) is not None:
        found["actor"] = name
    if reason:
        if len(reason) > MAX_REASON:
            fault = f"must have at most {MAX_REASON} characters, got {len(reason)}"
            raise InvalidInputError(errors=[("reason", fault)])
        found["reason"] = replace_unstorable(reason)
    return found


def act_json(data: Mapping[str, Any] | None = None, reason: str | None = None) -> str:
    """As `with_actor`, for a parameter of type jsonb."""
    return msgspec.json.encode(with_actor(data, reason)).decode()
