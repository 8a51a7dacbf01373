"""Short ways to hand outputs in and to take them as a validator does."""

from decimal import Decimal
from typing import Any

import msgspec

from lineshaft.checks.verdict import CandidateOutput
from lineshaft.engine.review.gated_output import GatedOutput
from lineshaft.model.states import Status
from lineshaft.model.tasks import Gate, OutputContract
from lineshaft.types.work import ClaimedTask, Completion, Spent
from tests.world import World, only, ref

ZERO = Decimal(0)
REPORT = {"why": "asked for", "what": "a page", "tradeoffs": "none worth naming"}
URL = OutputContract(validation="regex", validation_schema=r"https?://\S+")
PERSON = OutputContract(validation="human")


def gates(*listed: Gate, report: bool = False) -> OutputContract:
    return OutputContract(validation=tuple(listed), require_decision_report=report)


async def hand_in(
    world: World, task: ClaimedTask, output: Any = None, report: Any = None, **spent: Any
) -> Status:
    item = Completion(
        ref(task),
        output=msgspec.json.encode(output),
        decision_report=None if report is None else msgspec.json.encode(report),
        spent=Spent(**spent),
    )
    return only(await world.engine.work.complete([item])).unwrap()


async def slow(_: Any, __: CandidateOutput) -> bool:
    return True


async def taken(world: World, **options: Any) -> GatedOutput:
    """The one output that waits for a validator."""
    (output,) = await world.engine.gates.take(**({"limit": 5, "lease_sec": 60} | options))
    return output
