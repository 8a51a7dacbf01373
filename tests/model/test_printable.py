"""Text for terminals."""

import json

import pytest

from lineshaft.model.printable import printable


@pytest.mark.parametrize(
    "unsafe", ["\x1b", "\x07", "\r", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\u061c"]
)
def test_what_a_terminal_acts_on_is_escaped(unsafe: str) -> None:
    assert printable(f"a{unsafe}b") == f"a\\u{ord(unsafe):04x}b"


def test_all_other_text_is_kept() -> None:
    text = "Grüße\t日本\n👩‍🚀 \\u001b"

    assert printable(text) == text


def test_escaped_json_is_the_same_json() -> None:
    value = {"title": "a\x9b\u202eb"}

    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value
