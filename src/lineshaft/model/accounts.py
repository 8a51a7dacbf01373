"""Accounts with providers: an instance offers some, and each claim uses one.

An account whose window is used up is closed until the provider's instant, and claims choose another one. The
choice keeps prompt caches warm: the account of the task's last attempt, else the one that its DAG used last,
else one that is idle (`chosen_accounts_1` in migrations/0021_accounts.sql).
"""

from lineshaft.model.retry import fault_in
from lineshaft.model.storable import is_storable

#: Keys of slowdowns and breakers.
ACCOUNT = "account:"
AGENT = "agent:"
#: Accounts of one instance.
MAX_ACCOUNTS = 100
MAX_NAME = 200


def account_fault(name: str) -> str | None:
    ok = 1 <= len(name) <= MAX_NAME and name.isprintable() and is_storable(name)
    return fault_in(name, f"must be a name of 1 to {MAX_NAME} printable characters", ok=ok)
