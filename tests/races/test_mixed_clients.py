"""Many clients on two nodes do as they please, all at once; then everything must add up.

What each wants is drawn from a seed. How they meet is not: a failure may take some runs to come again.
"""

import asyncio
import random
from decimal import Decimal
from typing import Any

import pytest

from lineshaft.engine.engine import Engine
from lineshaft.errors import LineshaftError
from lineshaft.model.tasks import NewTask
from lineshaft.types.changes import TaskChange
from lineshaft.types.work import Completion, Release
from tests.races.helpers import DONE
from tests.world import ref

CLIENTS = 14
STEPS = 30
#: What they do, and how often.
WISHES = {
    "work": 8,
    "give back": 2,
    "submit": 2,
    "submit a dag": 2,
    "change": 6,
    "depend": 2,
    "ceiling": 1,
    "recheck": 1,
}


class Crowd:
    """What all of them know of: the tasks and DAGs that were made."""

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self.dags: list[str] = []

    async def act(self, engine: Engine, agent: str, draw: random.Random) -> None:
        match draw.choices(list(WISHES), list(WISHES.values()))[0]:
            case "work" | "give back" as wish:
                claim = await engine.claims.claim(agent, 1, limit=draw.randrange(1, 6), start=True)
                claims = [ref(task) for task in claim.tasks]
                if wish == "work":
                    await engine.work.complete([Completion(claim, DONE) for claim in claims])
                else:
                    await engine.work.release([Release(claim, None) for claim in claims])
            case "submit":
                made = await engine.submission.submit([task(draw) for _ in range(4)])
                self.tasks += [one.id for one in made]
            case "submit a dag":
                ceiling = draw.choice([None, 1.2])
                tasks = [task(draw) for _ in range(4)]
                dag = await engine.submission.submit_dag("d", tasks, budget_ceiling_usd=ceiling)
                self.dags.append(dag.id)
                self.tasks += [one.id for one in dag.tasks.values()]
            case "change" if self.tasks:
                await engine.edit.edit(
                    draw.choice(self.tasks[-12:]), TaskChange(priority=draw.randrange(100))
                )
            case "depend" if self.tasks:
                (one,) = await engine.submission.submit(
                    [task(draw, depends_on=[draw.choice(self.tasks[-8:])])]
                )
                self.tasks.append(one.id)
            case "ceiling" if self.tasks:
                virtual = f"dag_{draw.choice(self.tasks[-8:])[5:]}"
                await engine.budgets.set_dag_budget(
                    draw.choice([*self.dags, virtual]), draw.choice([1, 3, None])
                )
            case "recheck":
                await engine.maintenance.recheck_parked(100)


def task(draw: random.Random, **fields: Any) -> NewTask:
    return NewTask(
        draw.choice("xy"),
        lock_key=draw.choice([None, None, "doc:1", "doc:2", "doc:3"]),
        max_cost_usd=draw.choice([None, None, Decimal("0.5")]),
        priority=draw.randrange(100),
        **fields,
    )


@pytest.mark.slow("many clients do hundreds of things")
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_they_do_it_adds_up(engines: tuple[Engine, Engine], seed: int) -> None:
    """The fixture holds the tables against every rule (tests/invariants.py)."""
    crowd = Crowd()

    async def client(number: int) -> None:
        draw = random.Random(seed * 1_000 + number)
        for _ in range(STEPS):
            try:
                await crowd.act(engines[number % 2], f"a{1 + number % 2}", draw)
            except LineshaftError:
                # Refused: it has ended, or is gone.
                continue

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    await engines[0].maintenance.recheck_parked(1_000)
