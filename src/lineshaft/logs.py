"""Logging: one line per event, as text for people on a terminal, as JSON for programs.

`configure` is for the server, whose process is its own. Agents run in programs of other people: `shown`
prints Lineshaft's lines on standard error while they run, unless the program has configured logging itself.
"""

import io
import json
import logging
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from lineshaft.errors import SettingsError
from lineshaft.model.printable import printable
from lineshaft.settings import Settings
from lineshaft.tracebacks import user_traceback

if TYPE_CHECKING:
    from structlog.typing import EventDict, ExcInfo

#: The logger of a line per task: started, done, failed.
TASK_LINES = "lineshaft.agent.lifecycle"
#: On a terminal: people can't read more. Failures are always shown.
_TASK_LINES_PER_SEC = 40
_NAME = "lineshaft"
_COLOURS = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_DIM = "2"
_INDENT = " " * len("00:00:00 ")
_NARROWEST = 40
#: What every record has; all else was added by the caller.
_COMMON_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _is_text(log_format: str, stream: TextIO) -> bool:
    return log_format == "text" or (log_format == "auto" and stream.isatty())


def _trusted(stream: TextIO) -> TextIO:
    """The stream behind one that escapes control characters: the formatters here escape them."""
    trusted: TextIO = getattr(stream, "trusted", stream)
    return trusted


# Agents.


class LineLimit:
    """At most so many lines a second; the others are counted."""

    def __init__(self, per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = per_second
        self._clock = clock
        self._second = 0
        self._admitted = 0
        self._left_out = 0

    def admits(self) -> bool:
        now = int(self._clock())
        if now != self._second:
            self._second, self._admitted = now, 0
        if self._admitted >= self._most:
            self._left_out += 1
            return False
        self._admitted += 1
        return True

    def left_out(self) -> str:
        """How many lines were left out since the last call, in words; empty: none."""
        if not self._left_out:
            return ""
        number, self._left_out = self._left_out, 0
        return f"{number} lines left out (more than {self._most} a second)"


class TextFormatter(logging.Formatter):
    """`12:30:05 TYPE TASK message`. Other people's texts can't start a line or act on the terminal."""

    def __init__(self, *, colours: bool, width: int | None = None) -> None:
        """`width`: columns of the terminal; None: lines are not wrapped."""
        super().__init__()
        self._colours = colours
        self._width = width

    def format(self, record: logging.LogRecord) -> str:
        about = getattr(record, "task_id", None)
        if about is not None:
            about = printable(f"{getattr(record, 'task_type', '')} {about} ").lstrip()
        head = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {about or ''}"
        message = printable(record.getMessage())
        if record.levelno == logging.WARNING:
            message = f"warning: {message}"
        first, *others = message.splitlines() or [""]
        lines = [*self._wrapped(first, len(head)), *others]
        if record.exc_info and record.exc_info[1] is not None:
            lines += printable(user_traceback(record.exc_info[1])).splitlines()
        text = f"\n{_INDENT}".join(lines)
        # A terminal has printed ^C at the start of this line.
        start = "\r" if getattr(record, "signal", "") == "SIGINT" else ""
        return f"{start}{self._coloured(head, _DIM)}{self._coloured(text, _COLOURS.get(record.levelno, ''))}"

    def _wrapped(self, line: str, used: int) -> list[str]:
        """Between words; the first line begins after so many columns."""
        if self._width is None or used + len(line) <= self._width:
            return [line]
        wrapped = textwrap.wrap(
            line,
            max(self._width - len(_INDENT), _NARROWEST),
            initial_indent=" " * (used - len(_INDENT)),
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [wrapped[0].lstrip(), *wrapped[1:]] if wrapped else [line]

    def _coloured(self, text: str, colour: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self._colours and colour else text


class JsonFormatter(logging.Formatter):
    """One object per line, with the same names as the lines of the server."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _COMMON_FIELDS}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = user_traceback(record.exc_info[1]).rstrip()
        return printable(json.dumps(line, ensure_ascii=False, default=str))


class _Handler(logging.StreamHandler[TextIO]):
    """Leaves all to the program's own handlers if it adds some while agents run."""

    def __init__(self, stream: TextIO, *, limit: LineLimit | None) -> None:
        super().__init__(stream)
        self._limit = limit

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        if self._limit is not None and record.name == TASK_LINES and record.levelno <= logging.INFO:
            if not self._limit.admits():
                return
            self._count_left_out()
        super().emit(record)

    def _count_left_out(self) -> None:
        if self._limit is not None and (text := self._limit.left_out()):
            super().emit(logging.makeLogRecord({"name": TASK_LINES, "levelno": logging.INFO, "msg": text}))

    def close(self) -> None:
        self._count_left_out()
        super().close()


_lock = threading.Lock()
_users = 0
_installed = ExitStack()


@contextmanager
def shown(*, level: str | None = None) -> Iterator[None]:
    """Print Lineshaft's lines on standard error, unless the program has configured logging.

    Blocks may overlap; the first decides. `level`: instead of the one of the settings.
    """
    global _users, _installed  # noqa: PLW0603 - logging is global
    with _lock:
        _users += 1
        if _users == 1 and not _is_configured():
            _installed = _install(level)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _installed.close()


def _is_configured() -> bool:
    """Whether the program has handlers, or a level for all that Lineshaft logs."""
    own = logging.getLogger(_NAME)
    below = (
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(f"{_NAME}.") and isinstance(logger, logging.Logger)
    )
    return bool(
        logging.root.handlers
        or own.handlers
        or own.level
        or not own.propagate
        or any(each.handlers for each in below)
    )


def _install(level: str | None) -> ExitStack:
    stream = _trusted(sys.stderr)
    try:
        settings = Settings.load()
    except SettingsError:
        # A program that passes its own settings may have others in its environment.
        settings = Settings()
    level = level or settings.log_level
    is_text = _is_text(settings.log_format, stream)
    handler = _Handler(stream, limit=LineLimit(_TASK_LINES_PER_SEC) if stream.isatty() and is_text else None)
    width = shutil.get_terminal_size().columns if stream.isatty() else None
    handler.setFormatter(
        TextFormatter(colours=_has_colours(stream), width=width) if is_text else JsonFormatter()
    )
    removal = ExitStack()
    removal.callback(handler.close)
    logger = logging.getLogger(_NAME)
    logger.addHandler(handler)
    removal.callback(logger.removeHandler, handler)
    _set_level(_NAME, (level or "info").upper(), removal)
    if level is None and not stream.isatty():
        # A busy fleet would write thousands of lines a second that are rarely read.
        _set_level(TASK_LINES, logging.WARNING, removal)
    return removal


def _set_level(name: str, level: int | str, removal: ExitStack) -> None:
    logger = logging.getLogger(name)
    if not logger.level:
        logger.setLevel(level)
        removal.callback(logger.setLevel, logging.NOTSET)


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# The server.


def _escape_values(_: object, __: str, event: "EventDict") -> "EventDict":
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _escape_line(_: object, __: str, line: str) -> str:
    return printable(line)


def _as_json(event: "EventDict", **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _plain_traceback(stream: TextIO, exc_info: "ExcInfo") -> None:
    import structlog  # noqa: PLC0415 - see below

    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(printable(text.getvalue()))


def configure(log_format: str, level: str | None = None, stream: TextIO = sys.stderr) -> None:
    """Configure all logging of the server's process. `auto` is text on a terminal and JSON elsewhere."""
    import structlog  # noqa: PLC0415 - slow to import, and agents don't need it

    common = (
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    )
    stream = _trusted(stream)
    is_text = _is_text(log_format, stream)
    renderer: list[Any] = (
        # The prettier tracebacks show the values of variables, and with them secrets.
        [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=_plain_traceback)]
        if is_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_as_json)]
    )
    # Paths and errors come from others: a terminal would act on their control characters.
    safe = [_escape_values, *renderer] if is_text else [*renderer, _escape_line]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *safe],
        )
    )
    # No line has them, and every record would ask for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel((level or "info").upper())
    # uvicorn's lines go the same way; RequestMiddleware logs each request.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
