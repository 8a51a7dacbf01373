"""How many examples a property is tried with."""

from hypothesis import settings

IN_FULL_RUN = 100
IN_INNER_LOOP = 25


def examples(number: int) -> int:
    """`number` in a full run, a quarter of it otherwise: for tests whose examples take long."""
    return max(1, number * settings().max_examples // IN_FULL_RUN)
