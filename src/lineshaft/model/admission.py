"""What a task needs besides an agent: slots of quotas, its turn among others with its key, several locks."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from lineshaft.model.budget import shown
from lineshaft.model.fields import Faults, encoded_json, text_fault

MAX_QUOTA_KEYS = 8
MAX_QUOTA_KEY = 200
MAX_LOCK_KEYS = 8
#: Keys that tasks have by themselves.
BUILT_IN_KINDS = ("type:", "model:", "account:", "agent:", "tag:")


class LockKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A document lock; tasks that share it may run at the same time."""

    key: str
    shared: bool = False


class Admission(Struct, frozen=True, omit_defaults=True):
    """The column `admission`."""

    #: The task's own quota keys.
    keys: tuple[str, ...] = ()
    fair: str | None = None
    #: Document locks: whether each is shared. A single lock that isn't is the column `lock_key`.
    locks: dict[str, bool] = field(default_factory=dict)


def admission(
    quota_keys: Any, fair_key: Any, lock_keys: Any, lock_key: str | None, faults: Faults
) -> tuple[str | None, bytes | None]:
    """The columns `lock_key` and `admission` of a new task."""
    keys = _quota_keys(quota_keys, faults)
    if fair_key is not None and fair_key not in keys:
        faults.append(("fair_key", f"must be one of the quota_keys, got {shown(fair_key)}"))
    locks = _locks(lock_keys, lock_key, faults)
    if faults:
        return lock_key, None
    if list(locks.values()) == [False]:
        (lock_key,), locks = locks, {}
    needs = Admission(keys=keys, fair=fair_key, locks=locks)
    return lock_key, None if needs == Admission() else encoded_json("admission", needs)


def fair_key_of(needs: bytes | None) -> str | None:
    """The `fair_key` in a column `admission`."""
    if needs is None or b'"fair"' not in needs:
        return None
    return msgspec.json.decode(needs, type=Admission).fair


def locks_of(lock_key: str | None, stored: bytes | None) -> dict[str, bool]:
    """The document locks in these columns, in order of key: whether each is shared."""
    if lock_key is not None:
        return {lock_key: False}
    return {} if stored is None else msgspec.json.decode(stored, type=Admission).locks


def _quota_keys(values: Any, faults: Faults) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) > MAX_QUOTA_KEYS:
        faults.append(("quota_keys", f"must be a list of at most {MAX_QUOTA_KEYS} keys, got {shown(values)}"))
        return ()
    for value in values:
        if fault := quota_key_fault(value):
            faults.append(("quota_keys", fault))
            return ()
    return tuple(dict.fromkeys(values))


def quota_key_fault(value: Any) -> str | None:
    """What is wrong with a quota key of a task."""
    if fault := text_fault(value):
        return fault
    if len(value) > MAX_QUOTA_KEY or "*" in value:
        return f"must have at most {MAX_QUOTA_KEY} characters and no '*', got {shown(value)}"
    if value.startswith(BUILT_IN_KINDS):
        kinds = ", ".join(BUILT_IN_KINDS)
        return f"must not begin with {kinds}, which tasks have by themselves, got {shown(value)}"
    return None


def _locks(values: Any, lock_key: str | None, faults: Faults) -> dict[str, bool]:
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) > MAX_LOCK_KEYS:
        faults.append(("lock_keys", f"must be a list of at most {MAX_LOCK_KEYS} locks, got {shown(values)}"))
        return {}
    if values and lock_key is not None:
        faults.append(("lock_keys", "has all locks of the task: leave out lock_key"))
        return {}
    locks: dict[str, bool] = {}
    for value in values:
        lock: Any = LockKey(value) if isinstance(value, str) else value
        if not isinstance(lock, LockKey) or lock.shared not in {True, False} or text_fault(lock.key):
            faults.append(("lock_keys", f"must be keys, or {{key, shared}} each, got {shown(value)}"))
            return {}
        if lock.key in locks:
            faults.append(("lock_keys", f"names {shown(lock.key)} twice"))
            return {}
        locks[lock.key] = lock.shared
    return dict(sorted(locks.items()))


class HasQuotaKeys(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def tags(self) -> Sequence[str]: ...
    @property
    def admission(self) -> bytes | None: ...


def quota_keys(row: HasQuotaKeys) -> list[str]:
    """The keys that a task has before it is claimed."""
    own = () if row.admission is None else msgspec.json.decode(row.admission, type=Admission).keys
    return [f"type:{row.type}", *(f"tag:{tag}" for tag in row.tags), *own]
