"""Sources for tests."""

from typing import Any

import msgspec

from lineshaft.engine.engine import Engine
from lineshaft.types.sources import NewSource, Source, SourceKind
from tests.world import World

TASK: dict[str, Any] = {"task": {"type": "report", "spec": {"tick": "${event.tick}"}}}


def schedule(name: str = "s", **fields: Any) -> NewSource:
    if "cron" not in fields:
        fields.setdefault("every_sec", 60.0)
    return NewSource(name=name, kind=SourceKind.SCHEDULE, **{"template": TASK, **fields})


def webhook(name: str = "w", **fields: Any) -> NewSource:
    given = {"template": {"task": {"type": "hook"}}, "verify": {"scheme": "none"}, **fields}
    return msgspec.convert({"name": name, "kind": "webhook", **given}, NewSource)


async def put(engine: Engine, source: NewSource) -> Source:
    return (await engine.sources.put(source))[0]


async def outcomes(engine: Engine, name: str = "s") -> list[str]:
    """Oldest first."""
    page = await engine.sources.firings(name, limit=500)
    return [str(firing.outcome) for firing in page.items][::-1]


def column(world: World, query: str) -> list[Any]:
    """The first column of all rows."""
    return [next(iter(row.values())) for row in world.rows(query)]
