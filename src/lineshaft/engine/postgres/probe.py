"""Whether the database can be written to: a full disk or a standby still answers reads."""

import psycopg

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Database
from lineshaft.errors import UnavailableError

_SQL = catalog.load(__name__)


async def check_writable(database: Database) -> None:
    """Write a row and a file, and leave neither; raises UnavailableError if that fails."""
    async with database.connection() as connection:
        try:
            async with connection.transaction(force_rollback=True):
                for name in ("write_row", "little_memory", "write_file"):
                    await connection.execute(_SQL[name])
        except psycopg.Error as error:
            if connection.broken:
                raise
            reason = (str(error).splitlines() or [""])[0]
            raise UnavailableError(
                f"The database answers, but can't be written to: {reason}. Is its disk "
                "full, or is it a standby?"
            ) from error
