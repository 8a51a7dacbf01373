"""Brings back a server that was killed, for whoever goes on using it.

The kernel kills what takes too much memory, and PostgreSQL is often the largest process of a machine. Its
watcher ends with it. Every user looks for itself: the locks see to it that one of them starts the server, and
the others join it.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lineshaft.embedded.layout import Layout
from lineshaft.embedded.processes import find_postmaster
from lineshaft.embedded.server import EmbeddedServer
from lineshaft.errors import EmbeddedServerError

CHECK_EVERY_S = 2.0
_log = logging.getLogger("lineshaft.embedded")


@contextmanager
def kept_running(server: EmbeddedServer) -> Iterator[None]:
    """While the block lasts, the server is started again whenever it has ended; its DSN stays the same."""
    over = threading.Event()
    # Nobody waits for its end: a start that is under way may take long, and gives up its share by itself.
    threading.Thread(target=_keep, args=(server, over), name="lineshaft embedded", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _keep(server: EmbeddedServer, over: threading.Event) -> None:
    told = ""
    while not over.wait(CHECK_EVERY_S):
        try:
            if _has_ended(Layout(server.home)):
                server.start_again()
                told = ""
                _log.warning("The embedded PostgreSQL in %s had ended; it was started again.", server.home)
        except (EmbeddedServerError, OSError) as error:
            if str(error) != told:
                _log.error("The embedded PostgreSQL has ended and doesn't start again: %s", error)
            told = str(error)


def _has_ended(layout: Layout) -> bool:
    """Not if somebody removed the data: an empty database in its place would help nobody."""
    return layout.data_major() is not None and find_postmaster(layout) is None
