"""Whether the database can be written to: a full disk or a standby still answers reads."""

import psycopg

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import DatabaseError, UnavailableError

_SQL = catalog.load(__name__)


async def check_writable(database: Database) -> None:
    """Write a row and a file, and leave neither; raises UnavailableError if that fails."""
    try:
        async with database.connection() as connection, connection.transaction(force_rollback=True):
            await connection.execute(_SQL["write_row"])
            await connection.execute(_SQL["little_memory"])
            await connection.execute(_SQL["write_file"])
    except (psycopg.Error, DatabaseError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UnavailableError(
            f"The database answers, but can't be written to: {reason}. Is its disk full, or is it a standby?"
        ) from error
