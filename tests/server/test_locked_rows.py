"""Rows that another transaction holds: a call waits for a while, not until that transaction ends."""

from collections.abc import AsyncIterator

import pytest
from psycopg.conninfo import make_conninfo

from lineshaft.engine.engine import Engine
from lineshaft.errors import UnavailableError
from lineshaft.model.tasks import NewTask
from lineshaft.types import TaskChange
from tests.races.helpers import LIVE_ROW, held
from tests.server.conftest import serving


@pytest.fixture
def impatient(dsn: str) -> str:
    """A DSN with a shorter limit than the default."""
    return make_conninfo(dsn, options="-clock_timeout=200")


@pytest.fixture
async def task_id(dsn: str) -> AsyncIterator[str]:
    async with Engine(dsn) as engine:
        (task,) = await engine.submission.submit([NewTask("t", idempotency_key="k")])
        yield task.id


async def test_the_default_limit_is_ten_seconds(dsn: str) -> None:
    """R-051, R-064."""
    async with Engine(dsn) as engine, engine.database.connection() as connection:
        cursor = await connection.execute("SHOW lock_timeout")
        assert await cursor.fetchone() == ("10s",)


async def test_a_cancel_over_http_is_503_while_the_row_is_held(
    dsn: str, impatient: str, task_id: str
) -> None:
    """R-064: and works afterwards."""
    async with serving(impatient) as served:
        with held(dsn, LIVE_ROW, task_id):
            found = await served.client.post(f"/v1/tasks/{task_id}/cancel", {"reason": "x"})
            assert (found.status, found.json["code"], found.json["retryable"]) == (503, "unavailable", True)
            assert "retry-after" in found.headers
            assert "Another transaction has locked a row" in found.json["detail"]
        assert (await served.client.post(f"/v1/tasks/{task_id}/cancel", {"reason": "x"})).status == 200


async def test_every_operation_has_the_limit(dsn: str, impatient: str, task_id: str) -> None:
    """R-051: claims pass over the row; what needs it gives up; a submission gives up on a held key."""
    async with Engine(impatient) as engine:
        with held(dsn, LIVE_ROW, task_id):
            with pytest.raises(UnavailableError):
                await engine.edit.edit(task_id, TaskChange(priority=1))
            with pytest.raises(UnavailableError):
                await engine.cancel.cancel(task_id, "x")
        with held(dsn, "SELECT FROM lineshaft.task_key WHERE key = %s FOR UPDATE", "k") as holder:
            holder.execute("DELETE FROM lineshaft.task_key")
            with pytest.raises(UnavailableError):
                await engine.submission.submit([NewTask("t", idempotency_key="k")])
