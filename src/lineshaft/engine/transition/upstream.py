"""What others come to wait for: held as it is until they are there to be counted down."""

from collections.abc import Iterable

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.model.states import Status

_SQL = catalog.load("transition/upstream")
_STEPS = ("lock_ended_upstream", "lock_upstream", "upstream_stands")


async def hold_upstream(connection: Connection, names: Iterable[str]) -> dict[str, Status | None]:
    """Until the end of the transaction these tasks neither end nor are revived.

    Gives how each has ended; None: it is live. Those that don't exist are missing.
    """
    wanted = {"ids": list(names)}
    held: set[str] = set()
    while True:
        ended, live, standing = [await connection.execute(_SQL[step], wanted) for step in _STEPS]
        held |= {row[0] for row in await ended.fetchall()} | {row[0] for row in await live.fetchall()}
        stands = {name: status and Status(status) for name, status in await standing.fetchall()}
        # One that ended, or came back, while it was waited for is not held yet. What is COMPLETED stays so.
        if all(name in held or status is Status.COMPLETED for name, status in stands.items()):
            return stands
