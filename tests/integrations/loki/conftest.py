import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lineshaft.integrations.loki.mirror import Mirror, Options
from tests.integrations.loki.readers import check_as_readers_do, put, queue
from tests.world import World


class Shared:
    """A folder that a mirror keeps, and the queue behind it."""

    def __init__(self, world: World, root: Path) -> None:
        self.world = world
        self.root = root
        self.mirrors: list[Mirror] = []

    def mirror(self, **options: Any) -> Mirror:
        made = Mirror(self.world.engine, self.root, Options(**options), now=self.world.clock.now)
        self.mirrors.append(made)
        return made

    async def round(self, mirror: Mirror | None = None) -> None:
        """A round that sees every change: files that changed a moment ago are read again."""
        one = mirror or self.mirrors[0]
        await one.run_once()
        await one.run_once()
        check_as_readers_do(self.root)

    def change(self, name: str, act: Callable[[dict[str, dict[str, Any]]], object]) -> None:
        """Change a file as another program does: read it, write it."""
        records = {record["id"]: record for record in queue(self.root, name)}
        act(records)
        put(self.root, name, list(records.values()))

    def claim(self, task_id: str, agent: str = "sh") -> None:
        """As document 000's bash does: the record stays in pending."""
        self.change("pending", lambda records: records[task_id].update(claimedBy=agent))

    def move(self, task_id: str, source: str, target: str, **fields: Any) -> None:
        found: list[dict[str, Any]] = []
        self.change(source, lambda records: found.append(records.pop(task_id)))
        self.change(target, lambda records: records.update({task_id: found[0] | fields}))


@pytest.fixture
async def shared(world: World, tmp_path: Path) -> AsyncIterator[Shared]:
    made = Shared(world, tmp_path / ".loki")
    yield made
    for mirror in made.mirrors:
        await asyncio.wait_for(mirror.close(), 60)
