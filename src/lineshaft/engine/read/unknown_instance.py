"""The error for a process whose agent is unknown, or whose incarnation has ended."""

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_column
from lineshaft.errors import LineshaftError, NotFoundError, SupersededError

_SQL = catalog.load(__name__)


async def unknown_instance(connection: Connection, agent_id: str, incarnation: int) -> LineshaftError:
    """Why there is no instance with this incarnation."""
    incarnations = await fetch_column(connection, _SQL["current_incarnation"], {"agent_id": agent_id})
    if not incarnations:
        return NotFoundError(f"There is no agent {agent_id!r}. Register it first.")
    return SupersededError(
        f"Incarnation {incarnation} of agent {agent_id!r} has ended: its instance was registered again, was "
        f"reported as dead, or was silent for a day; the newest incarnation is {incarnations[0]}. This "
        "process must stop; if it is the right one, register it again."
    )
