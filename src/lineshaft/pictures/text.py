"""Text in pictures: safe, cut to fit, short."""

import re
import unicodedata
from decimal import Decimal
from functools import lru_cache

from lineshaft.model.printable import printable

#: Not allowed in XML, even escaped. Control characters are replaced by `printable`.
_NOT_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")
_NARROW, _WIDE_LETTERS = frozenset("fijlrtI.,:;'|!()[]{}/\\ -"), frozenset("mwMW@%")
#: It ends a text that is cut off.
_ELLIPSIS = "…"
#: How much wider bold letters are.
_BOLD = 1.15
_CENT = Decimal("0.01")


def clean(text: str, most: int) -> str:
    """One line of at most `most` characters that XML allows and that can't reorder the text around it."""
    cut = text[: most + 1]
    line = printable(" ".join(_NOT_XML.sub("\ufffd", cut).split()))
    return line if len(line) <= most and len(cut) == len(text) else line[: most - 1] + _ELLIPSIS


def fitting(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """The text, cut so that it is about `width` wide in letters of this size."""
    size *= _BOLD if bold else 1
    if text_width(text, size) <= width:
        return text
    room, kept = width - text_width(_ELLIPSIS, size), 0
    for letter in text:
        room -= text_width(letter, size)
        if room < 0:
            break
        kept += 1
    return text[:kept].rstrip() + _ELLIPSIS


def text_width(text: str, size: float) -> float:
    """An estimate for common sans-serif fonts."""
    return sum(map(_letter_width, text)) * size


@lru_cache(maxsize=4096)
def _letter_width(letter: str) -> float:
    """In the height of the font."""
    if letter in _NARROW:
        return 0.36
    if letter in _WIDE_LETTERS:
        return 0.92
    if letter.isascii():
        return 0.7 if letter.isupper() else 0.58
    if unicodedata.combining(letter):
        return 0.0
    return 1.05 if unicodedata.east_asian_width(letter) in "WF" else 0.7


#: Each unit with its seconds, and the next smaller one.
_UNITS = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))


def duration(seconds: float) -> str:
    """In the two largest units, such as 2 min 5 s."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:  # noqa: PLR2004 - one digit before the point
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = int(seconds)
    for unit, length, smaller, part in _UNITS:
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def dollars(amount: Decimal) -> str:
    """In cents, or in hundredths of a cent if it is less than one."""
    if amount < 0:
        return f"−{dollars(-amount)}"
    if amount >= _CENT:
        return f"${amount:,.2f}"
    return f"${amount:.4f}" if amount >= _CENT / 100 else f"<${_CENT / 100}"
