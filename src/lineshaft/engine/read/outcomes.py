"""What the counts by status don't tell: which dead letters timed out, which batches run, how long tasks take.

In milliseconds whatever the size of the queue: each figure is exact up to a bound.
"""

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader
from lineshaft.engine.read.stats import Bounds

#: Tasks that ended last, of which the average is taken.
_ENDS = 1_000

_SQL = catalog.load(__name__)


class Outcomes(Struct, frozen=True):
    #: Dead letters whose last attempt ran out of time.
    timed_out: int
    #: PENDING batches of which a child has started.
    batches_started: int
    #: Of an attempt that completed; None: none of the last tasks did.
    average_sec: float | None


async def read_outcomes(reader: Reader, bounds: Bounds) -> Outcomes:
    (row,) = await reader.rows(_SQL["outcomes"], most=bounds.most, ends=_ENDS)
    return Outcomes(**row)
