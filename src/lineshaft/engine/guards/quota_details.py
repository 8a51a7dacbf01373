"""A quota with its keys, and the tasks that use it and wait for it."""

from lineshaft.engine.postgres import catalog
from lineshaft.engine.read.snapshot import Reader
from lineshaft.types.quota_details import MAX_NAMED, QuotaDetails, QuotaKey, QuotaUser, QuotaWaiter
from lineshaft.types.quotas import Quota

_SQL = catalog.load(__name__)


async def read_details(reader: Reader, quota: Quota) -> QuotaDetails:
    about = {"quota": quota.name, "limit": MAX_NAMED}
    keys = await reader.send(_SQL["keys"], **about)
    users = await reader.send(_SQL["users"], **about)
    waiters = await reader.send(_SQL["waiters"], **about)
    return QuotaDetails(
        quota,
        [QuotaKey(**row) for row in await keys.fetchall()],
        [QuotaUser(**row) for row in await users.fetchall()],
        [QuotaWaiter(**row) for row in await waiters.fetchall()],
    )
