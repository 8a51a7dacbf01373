"""What an agent is told besides its work: whether it is wanted, and whether it shall slow down."""

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import NotFoundError, SupersededError


@dataclass(frozen=True, slots=True)
class Present:
    incarnation: int
    #: active or draining.
    status: str
    #: It was taken for offline until now.
    is_back: bool
    capabilities: list[str]
    types: list[str] | None
    models_available: list[str]
    #: The end of the longest slow-down of its models, or of all; None: there is none.
    slowdown_until: datetime | None


class Signals:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = catalog.load("signals")

    async def present(self, agent_id: str, incarnation: int) -> Present:
        """An agent asks for work, and so it is there; also tells what it may take."""
        parameters = {**self._database.now, "agent_id": agent_id, "incarnation": incarnation}
        async with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(Present)) as cursor,
        ):
            await cursor.execute(self._sql["present"], parameters)
            found = await cursor.fetchone()
        if found is None:
            raise NotFoundError(f"There is no agent {agent_id!r}. Register it first.")
        if found.incarnation != incarnation:
            raise SupersededError(
                f"Agent {agent_id!r} was registered again: this is incarnation {incarnation}, the one in "
                f"force is {found.incarnation}. This process must stop; if it is the right one, register "
                "it anew."
            )
        return found
