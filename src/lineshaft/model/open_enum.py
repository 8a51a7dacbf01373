"""Enums of responses, which a newer server may extend."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Self


class OpenEnum(StrEnum):
    """An enum that takes a value it doesn't declare as text, so that older clients work with newer servers.

    Such a value compares, hashes and prints as its text, but isn't a member. A request must not accept one:
    it is read as `str` and checked against the members.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        text = str.__new__(cls, value)
        text._name_ = text._value_ = value
        return text

    @property
    def is_known(self) -> bool:
        """Whether this version declares the value."""
        return self._value_ in type(self)._value2member_map_

    @classmethod
    def in_order(cls, values: Iterable[str]) -> list[Self]:
        """The values in the order of the members; those that this version doesn't declare come last."""
        known = list(cls._value2member_map_)
        return [
            cls(value)
            for value in sorted(set(values), key=lambda v: known.index(v) if v in known else len(known))
        ]
