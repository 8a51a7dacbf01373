"""How work flows: what ended in each minute of the last hour, and how long recent tasks had waited."""

from datetime import timedelta

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader
from lineshaft.engine.read.tally import figures_age_sec
from lineshaft.types.stats import Minute, ThroughputHistory, Waits

#: Ended tasks whose waits are read.
_WAITS = 1_000
_MINUTES = 60

_SQL = catalog.load(__name__)


async def read_waits(reader: Reader) -> Waits:
    (row,) = await reader.rows(_SQL["waits"], most=_WAITS)
    return Waits(row["n"], *(row["quantiles"] or (None, None, None)))


async def read_throughput(reader: Reader) -> ThroughputHistory:
    (clock,) = await reader.rows(_SQL["clock"])
    now = clock["now"]
    last = now.replace(second=0)
    first = last - timedelta(minutes=_MINUTES - 1)
    known = {row["at"]: Minute(**row) for row in await reader.rows(_SQL["minutes"], since=first, upto=last)}
    every = [first + timedelta(minutes=n) for n in range(_MINUTES)]
    return ThroughputHistory(
        now,
        [known.get(at, Minute(at)) for at in every],
        await read_waits(reader),
        await figures_age_sec(reader),
    )
