"""What needs a person, in one statement: every page of the dashboard shows it."""

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader
from lineshaft.types.attention import MOST, Attention

_SQL = catalog.load(__name__)


async def read_attention(reader: Reader) -> Attention:
    (row,) = await reader.rows(_SQL["attention"], most=MOST)
    return Attention(**row)
