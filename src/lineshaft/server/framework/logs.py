"""Logging: one line per event, for people or for programs, with the ids of the request and its subject."""

import io
import logging
import sys
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, ExcInfo, Processor

from lineshaft.model.printable import printable
from lineshaft.server.framework.connections import RepeatedLines

_COMMON: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def _escape_values(_: object, __: str, event: EventDict) -> EventDict:
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _escape_line(_: object, __: str, line: str) -> str:
    return printable(line)


def _as_json(event: EventDict, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _plain_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(printable(text.getvalue()))


def configure(log_format: str, stream: TextIO = sys.stderr) -> None:
    """Configure all logging of the process. `auto` is pretty on a terminal and JSON elsewhere."""
    stream = getattr(stream, "trusted", stream)
    pretty = log_format == "pretty" or (log_format == "auto" and stream.isatty())
    renderer: list[Any] = (
        # The prettier tracebacks show the values of variables, and with them secrets.
        [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=_plain_traceback)]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_as_json)]
    )
    # Paths and errors come from others: a terminal would act on their control characters.
    safe = [_escape_values, *renderer] if pretty else [*renderer, _escape_line]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_COMMON,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *safe],
        )
    )
    # No line has them, and every record would ask for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("asyncio").addFilter(RepeatedLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    # uvicorn's lines go the same way; RequestMiddleware logs each request.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*_COMMON, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
