"""The limit on cost velocity: everything stops when more than `velocity_usd` is spent within its window.

The window begins with an exact figure when the limit is set, and again when a stop is resumed. From then on
every process that books money looks (`look_if_due`) as soon as a thousandth of the limit was booked since the
last look, and with a report within a reservation as soon as its attempt has reported a thousandth more. So
before the stop no more passes than the limit, a thousandth of it for what is booked and for each running
attempt, and the last report; docs/guard-rails.md has the bound. The promoter looks too, and forgets samples.
"""

from decimal import Decimal
from typing import Any

from msgspec import Struct

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection
from lineshaft.engine.postgres.rows import fetch_row, fetch_rows, fetch_value

_SQL = catalog.load(__name__)
Now = dict[str, Any]
#: Goes into the pipeline behind a statement that books money.
IS_DUE = _SQL["is_due"]


class _Due(Struct, frozen=True):
    is_due: bool
    is_paused: bool


class _Window(Struct, frozen=True):
    velocity_usd: Decimal
    velocity_window_sec: float
    spent_usd: Decimal


async def begin(connection: Connection, now: Now) -> None:
    """What was spent before doesn't count. Without a limit there are no samples."""
    await connection.execute(_SQL["forget_samples"], {})
    # Later statements: a sample of the same instant may just have been deleted.
    await connection.execute(_SQL["begin"], now)
    await connection.execute(_SQL["date_back"], now)


async def look_if_due(connection: Connection, now: Now) -> bool:
    """After money was booked: stop everything if it is too much; returns whether everything is paused."""
    (due,) = await fetch_rows(connection, _Due, IS_DUE, now)
    if due.is_due and not await look(connection, now):
        # Another process may have stopped it at the same time.
        (due,) = await fetch_rows(connection, _Due, IS_DUE, now)
        return due.is_paused
    return due.is_due or due.is_paused


async def look(connection: Connection, now: Now) -> bool:
    """Stop everything if too much was spent within the window; returns whether it stopped now."""
    # The sample and the stop are seen together: a process that sees only the sample has no reason to look.
    async with connection.transaction():
        window = await fetch_row(connection, _Window, _SQL["look"], now)
        if window is None or window.spent_usd <= window.velocity_usd:
            return False
        reason = (
            f"{_usd(window.spent_usd)} were spent within {_minutes(window.velocity_window_sec)}, more than "
            f"{_usd(window.velocity_usd)}: everything is paused until it is resumed"
        )
        return bool(await fetch_value(connection, _SQL["stop"], {**now, "reason": reason}))


async def forget_old_samples(connection: Connection, now: Now) -> None:
    await connection.execute(_SQL["forget_old_samples"], now)


def _usd(amount: Decimal) -> str:
    return f"{amount.normalize():f} USD"


def _minutes(seconds: float) -> str:
    return "a minute" if seconds == 60 else f"{seconds / 60:g} minutes"  # noqa: PLR2004 - it is one
