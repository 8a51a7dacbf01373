"""Where a process is: on SIGUSR1 it writes the stacks of its threads and of its asyncio tasks to its log."""

import asyncio
import faulthandler
import signal
import sys


def install(loop: asyncio.AbstractEventLoop) -> None:
    def write_tasks(*_: object) -> None:
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=sys.stderr)
            # `print_stack` shows the outermost frame only.
            waiting: object = task.get_coro()
            while (frame := getattr(waiting, "cr_frame", None)) is not None:
                sys.stderr.write(f"    in {frame.f_code.co_filename}:{frame.f_lineno}\n")
                waiting = getattr(waiting, "cr_await", None)
        sys.stderr.flush()

    signal.signal(signal.SIGUSR1, write_tasks)
    # Threads also while the event loop is blocked.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
