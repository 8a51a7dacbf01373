"""The lines of agents and servers."""

import json
import logging
import subprocess
import sys

import pytest

from lineshaft.logs import JsonFormatter, LineLimit, TextFormatter, shown


def record(message: str, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "lineshaft.x", "levelno": level, "msg": message, "created": 0.0})
    made.levelname = logging.getLevelName(level)
    made.__dict__.update(fields)
    return made


def test_lines_are_wrapped_between_words_below_the_text() -> None:
    lines = TextFormatter(colours=False, width=50).format(
        record("word " * 20, task_id="task_1", task_type="t")
    )

    first, *others = lines.splitlines()
    assert first[8:].startswith(" t task_1 word word")
    assert len(others) == 2
    assert all(line.startswith(" " * 9 + "word") for line in others)
    assert max(map(len, lines.splitlines())) <= 50
    assert TextFormatter(colours=False, width=50).format(record("x" * 90)).endswith("x" * 90)


def test_text_of_others_neither_starts_a_line_nor_acts_on_the_terminal() -> None:
    text = TextFormatter(colours=True).format(record("a\n00:00:00 forged\x1b[2J", logging.WARNING))

    assert text.splitlines()[1] == " " * 9 + "00:00:00 forged\\u001b[2J\x1b[0m"
    assert "\x1b[33mwarning: a\n" in text


def test_json_has_the_names_of_the_servers_lines() -> None:
    code = (
        "import logging; from lineshaft import logs; logs.configure('json'); fault = ValueError('x');"
        "logging.getLogger('lineshaft.x').error('hello', extra={'task_id': 'task_1'}, exc_info=fault)"
    )
    server = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr
    raised = (ValueError, ValueError("x"), None)
    agent = JsonFormatter().format(record("hello", logging.ERROR, task_id="task_1", exc_info=raised))

    assert json.loads(agent).keys() == json.loads(server).keys()
    for name in ("level", "logger", "event", "task_id", "exception"):
        assert json.loads(agent)[name] == json.loads(server)[name]


def test_values_of_variables_are_never_logged() -> None:
    def fail(secret: str) -> None:
        raise ValueError(len(secret))

    for formatter in (TextFormatter(colours=False), JsonFormatter()):
        try:
            fail("s3cret")
        except ValueError as error:
            text = formatter.format(record("failed", exc_info=(ValueError, error, error.__traceback__)))
            assert "in fail" in text
            # Only as it is written in this file.
            assert text.count("s3cret") == 1


def test_more_lines_than_people_can_read_are_counted() -> None:
    now = 0.0
    limit = LineLimit(3, lambda: now)

    assert [limit.admits() for _ in range(5)] == [True, True, True, False, False]
    assert limit.left_out() == "2 lines left out (more than 3 a second)"
    assert limit.left_out() == ""
    assert not limit.admits()
    now = 1.0
    assert limit.admits()


def test_logging_is_as_before_when_the_last_agent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    own = logging.getLogger("lineshaft")
    with shown():
        (handler,) = own.handlers
        with shown(level="error"):
            assert own.handlers == [handler]
        assert (own.level, own.handlers) == (logging.INFO, [handler])
    assert (own.level, own.handlers) == (logging.NOTSET, [])
    assert logging.getLogger("lineshaft.agent.lifecycle").level == logging.NOTSET
