"""Tables on terminals and in pipes."""

import re

import pytest

from lineshaft.cli.output import cut, display_width, print_table

COLUMNS = ("TASK", "STATUS", "TITLE", "USD")
ROWS = [
    ("task_01M7MGTMM481", "COMPLETED", "A title that is too long for a narrow terminal 日本語", "12"),
    ("task_01M7MGTMM482", "READY", "x", "0.5"),
]
Output = pytest.CaptureFixture[str]


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text: str) -> list[str]:
    return re.sub(r"\033\[[\d;]*m", "", text).splitlines()


def test_a_pipe_gets_everything(capsys: Output) -> None:
    print_table(COLUMNS, ROWS, empty="", optional=("USD",))

    lines = capsys.readouterr().out.splitlines()
    assert ROWS[0][2] in lines[1]
    assert len({display_width(line.rpartition("  ")[0]) for line in lines}) == 1, (
        "aligned, wide characters too"
    )
    assert "\033" not in "".join(lines)


@pytest.mark.parametrize("columns", [55, 80, 200])
def test_a_terminal_cuts_texts_but_never_ids_and_states(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, columns: int
) -> None:
    on_terminal(monkeypatch, columns)
    print_table(COLUMNS, ROWS, empty="", optional=("USD",))

    out = capsys.readouterr().out
    lines = plain(out)
    assert all(display_width(line) <= columns for line in lines)
    assert "task_01M7MGTMM481  COMPLETED" in lines[1]
    assert ("USD" in lines[0], ROWS[0][2] in lines[1]) == (columns > 55, columns == 200)
    assert "\033[32mCOMPLETED\033[0m" in out


def test_a_very_long_text_is_cut_at_once() -> None:
    """Each character was measured again for each that was cut off: this took minutes."""
    assert cut("│" * 200_000, 10) == "│" * 9 + "…"
    assert [cut("日本語", limit) for limit in (6, 5, 4, 3)] == ["日本語", "日本…", "日…", "日…"]
    assert cut("e\N{COMBINING ACUTE ACCENT}xyz", 3) == "e\N{COMBINING ACUTE ACCENT}x…"


def test_colours_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    on_terminal(monkeypatch, 80)
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(COLUMNS, ROWS, empty="")

    assert "\033" not in capsys.readouterr().out


def test_an_empty_table_is_a_sentence(capsys: Output) -> None:
    print_table(COLUMNS, [], empty="No tasks.")

    assert capsys.readouterr().out == "No tasks.\n"
