"""Processes of one agent on one machine: their names, and noticing that one has died.

A process that is killed can't report it, and its tasks would wait until their leases expire. But every other
process of the machine can see that it is gone. So each one watches a few others, and a new one looks at all:
what a dead process held goes on at once.

The name of an instance says which process it is: host, boot, PID namespace, process id and start time. Only
processes of the same boot and namespace can be judged; a process id alone may have been used again. This
works where there is /proc; elsewhere leases expire as usual.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lineshaft import background
from lineshaft.client.backend import Backend
from lineshaft.errors import LineshaftError
from lineshaft.model.instance_names import ProcessName, parse, short_names
from lineshaft.operations import agents
from lineshaft.types.agents import MAX_INSTANCE
from lineshaft.types.work import Presence

_log = logging.getLogger("lineshaft.agent")

#: How often processes are looked at.
_LOOK_SEC = 1.0
#: How often to ask which ones to watch: with others on this machine, and alone.
_ASK_SEC, _ASK_ALONE_SEC = 10.0, 30.0
#: The agents of one process have names of their own.
_numbers = count(1)


class _Place(NamedTuple):
    """Where process ids and start times can be compared."""

    boot: str
    namespace: str


@cache
def host_name() -> str:
    return socket.gethostname()[:200]


@cache
def _place() -> _Place | None:
    """None: this system doesn't say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = re.search(r"\d+", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        return None
    return None if namespace is None else _Place(boot, namespace[0])


def _started_at(pid: int) -> str | None:
    """The start time of a running process, in the kernel's ticks; None: there is none.

    Empty if it runs but can't be read: processes of other accounts may be hidden (hidepid, ProtectProc).
    """
    try:
        # The name in parentheses may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if _exists(pid) else None
    # A zombie has ended; its parent hasn't noticed yet.
    state, start = fields[0], fields[19]
    return None if state in {"Z", "X"} else start


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it may not be signalled, so it is there
        return True
    return True


def new_name() -> str:
    """A name for an instance of this process."""
    place = _place()
    pid = os.getpid()
    boot, namespace = place or ("00000000", "0")
    start = _started_at(pid) or "0"
    return str(ProcessName(host_name(), boot, namespace, str(pid), start, str(next(_numbers))))[
        -MAX_INSTANCE:
    ]


def is_dead(name: str) -> bool:
    """Whether the process of an instance on this machine is known to have ended."""
    place = _place()
    process = parse(name)
    if place is None or process is None or (process.boot, process.namespace) != place:
        return False
    return _started_at(int(process.pid)) not in {process.start, ""}


async def watch(
    backend: Backend, watcher: Presence, looked: asyncio.Event, dead: Callable[[str], bool] = is_dead
) -> None:
    """Report siblings of an instance that have died; until it is cancelled.

    `looked` is set once all siblings were looked at for the first time, or can't be.
    """
    clock = asyncio.get_running_loop().time
    watched: Sequence[str] = ()
    ask_at, pause = clock(), _LOOK_SEC
    # A new instance looks at all of them, and then keeps an eye on a few.
    everyone = True
    try:
        while True:
            if clock() >= ask_at or any(map(dead, watched)):
                try:
                    everyone = everyone or any(map(dead, watched))
                    watched = await _report_dead(backend, watcher, dead, everyone=everyone)
                    everyone = False
                except LineshaftError as error:
                    # It is tried again; if this instance was superseded, its heartbeats notice.
                    _log.debug("Asking for the siblings of agent %s failed: %s", watcher.agent_id, error)
                except Exception:  # noqa: BLE001 - logged; others may die while this one goes on
                    _log.exception("Looking at siblings of agent %s failed; trying again", watcher.agent_id)
                looked.set()
                # Replicas are started together: soon again at first.
                pause = min(2 * pause, _ASK_SEC if watched else _ASK_ALONE_SEC)
                ask_at = clock() + pause
            await asyncio.sleep(_LOOK_SEC)
    finally:
        looked.set()


async def _report_dead(
    backend: Backend, watcher: Presence, dead: Callable[[str], bool], *, everyone: bool
) -> Sequence[str]:
    """Returns the siblings to watch. One that has left as it should isn't among those that are asked for."""

    async def ask(gone: Sequence[str] = (), *, everyone: bool = False) -> Sequence[str]:
        request = agents.SiblingsOfInstance(
            id=watcher.agent_id, incarnation=watcher.incarnation, gone=tuple(gone), everyone=everyone
        )
        return (await backend.call(agents.watch_siblings, request)).instances

    names = await ask(everyone=everyone)
    gone = [name for name in names if dead(name)]
    if gone:
        names = await ask(gone)
        _log.warning("Processes of agent %s have died: %s", watcher.agent_id, ", ".join(short_names(gone)))
    elif everyone:
        names = await ask()
    return names


@contextlib.asynccontextmanager
async def watching(backend: Backend, watcher: Presence, looked: asyncio.Event) -> AsyncIterator[None]:
    """Watch siblings while the block runs; see `watch`."""
    task = asyncio.create_task(
        watch(backend, watcher, looked), name=f"lineshaft siblings of {watcher.agent_id}"
    )
    try:
        yield
    finally:
        await background.stop(task)
