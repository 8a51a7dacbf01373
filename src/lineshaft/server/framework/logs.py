"""Logging: one line per event, for people or for programs, with the ids of the request and its subject."""

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from lineshaft.server.framework.connections import RepeatedLines

_COMMON: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(log_format: str, stream: TextIO = sys.stderr) -> None:
    """Configure all logging of the process. `auto` is pretty on a terminal and JSON elsewhere."""
    pretty = log_format == "pretty" or (log_format == "auto" and stream.isatty())
    renderer: list[Any] = (
        # The prettier tracebacks show the values of variables, and with them secrets.
        [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_COMMON,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
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
