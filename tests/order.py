"""The order of the tests of a parallel run: those that take long come first.

xdist gives each worker an equal share of the tests, in their order. A worker that has run its share takes
tests from the end of another's. So each share begins with slow tests and ends with quick ones: at the end of
a run no worker is alone with a slow test.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def slow_first(
    tests: Sequence[T], workers: int, *, is_slow: Callable[[T], bool], module: Callable[[T], object]
) -> list[T]:
    """The tests share by share. The slow tests of a module stay together, because they share fixtures."""
    quick: list[T] = []
    slow: dict[object, list[T]] = defaultdict(list)
    for test in tests:
        (slow[module(test)] if is_slow(test) else quick).append(test)
    shares: list[list[T]] = [[] for _ in range(workers)]
    for together in sorted(slow.values(), key=len, reverse=True):
        min(shares, key=len).extend(together)
    left = len(tests)
    for number, share in enumerate(shares):
        # As xdist divides them.
        size = left // (workers - number)
        left -= size
        filling = quick[: max(0, size - len(share))]
        del quick[: len(filling)]
        share.extend(filling)
    return [test for share in shares for test in share]
