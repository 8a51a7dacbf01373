"""Who acts: the event of what a person or a token did by hand has the name as `actor`.

What agents do in the course of their work, and what duties do, has no actor.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from lineshaft.engine.caller import caller, calling
from lineshaft.errors import InvalidInputError
from lineshaft.model.storable import replace_unstorable
from lineshaft.types.request import MAX_REASON


def acting_as(name: str | None) -> AbstractContextManager[None]:
    """Acts within the block have this actor; None: they have none."""
    return calling(actor=name)


def actor_name() -> str | None:
    """Who acts, as it is stored; None: unknown, or no person acts."""
    name = caller().actor
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
