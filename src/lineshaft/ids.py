"""Prefixed ULIDs: readable in psql, sortable by creation time, safe as a file name.

A ULID is 48 bits of milliseconds and 80 random bits, in 26 characters of Crockford's base 32. Within a
process ids always grow: in the same millisecond, or when the clock steps back, the last value is increased by
a random amount. The libraries cost 10 µs per id, a tenth of a bulk submission, or keep their random state
across a fork.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Two characters for each ten bits.
_PAIRS = tuple(high + low for high in _ALPHABET for low in _ALPHABET)
_RANDOM_BITS = 80
#: Leaves room for billions of ids within one millisecond and keeps the next one unguessable.
_STEP_BYTES = 4


class IdFactory:
    def __init__(
        self,
        milliseconds: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._milliseconds = milliseconds
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._last = 0
        self._steps: list[int] = []

    def __call__(self, prefix: str) -> str:
        """A new id such as `task_01J8K2M3N4P5Q6R7S8T9V0W1X2`."""
        with self._lock:
            milliseconds = self._milliseconds()
            if milliseconds > self._last >> _RANDOM_BITS:
                random = int.from_bytes(self._random_bytes(_RANDOM_BITS // 8))
                value = milliseconds << _RANDOM_BITS | random
            else:
                value = self._last + 1 + self._step()
            self._last = value
        return f"{prefix}_{_spell(value)}"

    def _step(self) -> int:
        """A random increment from a stock: a system call for four bytes costs more than the rest of an id."""
        if not self._steps:
            stock = self._random_bytes(_STEP_BYTES * 256)
            self._steps = [
                int.from_bytes(stock[i : i + _STEP_BYTES]) for i in range(0, len(stock), _STEP_BYTES)
            ]
        return self._steps.pop()


def _spell(value: int) -> str:
    # 13 pairs are 130 bits, of which the first two are always 0. Two halves: small integers shift faster,
    # and the upper half is the same for all ids of a millisecond.
    low = value & _LOW
    return (
        _spell_high(value >> 60)
        + _PAIRS[low >> 50]
        + _PAIRS[low >> 40 & 1023]
        + _PAIRS[low >> 30 & 1023]
        + _PAIRS[low >> 20 & 1023]
        + _PAIRS[low >> 10 & 1023]
        + _PAIRS[low & 1023]
    )


@lru_cache(maxsize=16)
def _spell_high(high: int) -> str:
    return "".join([_PAIRS[high >> shift & 1023] for shift in range(60, -1, -10)])


_LOW = (1 << 60) - 1


new_id = IdFactory()


def _forget_after_fork() -> None:
    # Two processes that continue from the same value could create the same id. The lock may have been held by
    # a thread that doesn't exist in the child.
    new_id._lock = threading.Lock()  # noqa: SLF001 - the module's own instance
    new_id._last = 0  # noqa: SLF001
    new_id._steps.clear()  # noqa: SLF001


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_after_fork)
