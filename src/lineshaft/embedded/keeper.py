"""Restarts a killed server for the processes that use it.

The kernel kills processes that take too much memory, and PostgreSQL is often the largest process of a
machine. Its watcher ends with it. Every user checks on its own: because of the locks one of them starts the
server, and the others join it.
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
    """During the block, restart the server whenever it has ended; its DSN stays the same."""
    over = threading.Event()
    # The thread isn't joined: a start in progress may take long, and releases its share on its own.
    threading.Thread(target=_keep, args=(server, over), name="lineshaft embedded", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _keep(server: EmbeddedServer, over: threading.Event) -> None:
    last_error = ""
    while not over.wait(CHECK_EVERY_S):
        try:
            # After the block it may have stopped because it had no users any more.
            if _has_ended(Layout(server.home)) and not over.is_set():
                server.restart()
                last_error = ""
                _log.warning(
                    "The embedded PostgreSQL in %s ended unexpectedly and was restarted.", server.home
                )
        except (EmbeddedServerError, OSError) as error:
            if str(error) != last_error:
                _log.error("The embedded PostgreSQL ended and can't be restarted: %s", error)
            last_error = str(error)


def _has_ended(layout: Layout) -> bool:
    """False if the data was removed: an empty database in its place would not help."""
    return layout.data_major() is not None and find_postmaster(layout) is None
