"""The process that starts PostgreSQL, waits until it has no users, and stops it.

It runs as a script (`python -I -S watcher.py <home>`), detached from its starter, and imports only a few
small modules of the standard library, so that it needs little memory.

The protocol consists of three locks in the home directory. The kernel releases a lock when its holder ends in
any way, so no list of users can become stale:

- `start.lock`, exclusive: the process that starts or stops the server.
- `users.lock`, shared: each user of the server, taken while holding `start.lock`.
- `watcher.lock`, exclusive: the watcher, for its lifetime.

The watcher stops the server only while it holds `start.lock` and `users.lock`, both exclusively: then the
server has no users and can't get new ones. A new user waits for `start.lock` and starts the server again.

The watcher is the parent of `postgres`: where process 1 reaps no children, as in many containers, a
postmaster without a living parent would stay a zombie and look alive. If the watcher is killed, the server
keeps running, and the next user starts a watcher that adopts it.
"""

# pathlib and contextlib would cost the watcher more memory than all the rest of it.
# ruff: noqa: PTH106, PTH108, PTH112, PTH116, PTH118, PTH123, PTH208, SIM105

import fcntl
import json
import os
import signal
import sys
import time

DATA_FD = 3
"""The descriptor under which `postgres` inherits its data directory: see `account.data_argument`."""

SOCKET_DIRECTORY = "socket"
"""In the data directory, which only its owner can enter."""

CHECK_EVERY_S = 0.5
# A fast shutdown writes a checkpoint, which may take long on a slow disk; aborting it costs a recovery.
STOP_STEPS = ((signal.SIGINT, 120.0), (signal.SIGQUIT, 30.0), (signal.SIGKILL, 30.0))
CHECK_LOG_EVERY_S = 60.0
LOG_LIMIT_BYTES = 16 * 1024 * 1024
LOG_KEPT_BYTES = 1024 * 1024
OWN_LOCK_PATIENCE_S = 10.0


def start_time_of(pid: int) -> str | None:
    """The start time of a process, which distinguishes it from a later one with the same id; None: ended.

    A zombie counts as ended. Without /proc (macOS) only the use of the id is known.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return "unknown"
    state, started = fields[0], fields[19]
    return None if state in b"ZX" else started.decode()


class WatchedPostmaster:
    def __init__(self, pid: int, *, is_child: bool) -> None:
        self.pid = pid
        self._is_child = is_child
        self._started = start_time_of(pid)
        self._ended = False

    def has_ended(self) -> bool:
        if not self._ended:
            self._ended = self._reaped() if self._is_child else start_time_of(self.pid) != self._started
        return self._ended

    def _reaped(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return True

    def stop(self) -> None:
        for step, patience in STOP_STEPS:
            deadline = time.monotonic() + patience
            try:
                os.kill(self.pid, step)
            except ProcessLookupError:
                pass
            while time.monotonic() < deadline:
                if self.has_ended():
                    return
                time.sleep(0.02)


def main() -> None:
    home = sys.argv[1]
    order = json.load(sys.stdin)
    # The caller waits for the first process; the second is detached and outlives the caller.
    if os.fork():
        os._exit(0)
    stop_requested = []
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stop_requested.append(received))
    os.chdir("/")
    os.umask(0o077)
    own_lock = _lock_file(home, "watcher.lock")
    if not _takes(own_lock, patience=OWN_LOCK_PATIENCE_S):
        _report({"error": "another watcher is running"})
        return
    _note_own_pid(own_lock)
    if order["adopt"] is None:
        postmaster = WatchedPostmaster(_launch(order), is_child=True)
    else:
        postmaster = WatchedPostmaster(order["adopt"], is_child=False)
    _report({"postmaster": postmaster.pid})
    _watch(home, postmaster, stop_requested)
    if order["link"] is not None:
        _remove_link(order["link"])


def _note_own_pid(own_lock: int) -> None:
    """For people; nothing depends on it, so a full disk is ignored."""
    try:
        os.ftruncate(own_lock, 0)
        os.write(own_lock, f"{os.getpid()}\n".encode())
    except OSError:
        pass


def _report(result: dict[str, object]) -> None:
    """Report to the caller, then close its pipes: it waits for their end."""
    try:
        os.write(1, json.dumps(result).encode())
    except BrokenPipeError:
        pass  # The caller was killed, so it isn't a user: the watch detects that.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)


def _launch(order: dict[str, object]) -> int:
    data = os.open(str(order["data"]), os.O_RDONLY | os.O_DIRECTORY)
    pid = os.fork()
    if pid:
        os.close(data)
        return pid
    try:
        _become_postgres(data, order)
    except BaseException as error:  # noqa: BLE001 - no exception may reach the watcher's own code
        os.write(2, f"lineshaft: {order['command']} could not be run: {error}\n".encode())
    os._exit(127)


def _become_postgres(data: int, order: dict[str, object]) -> None:
    os.dup2(data, DATA_FD)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)
    account = order["account"]
    if isinstance(account, list):
        uid, gid = account
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    _make_socket_directory()
    command, environment = order["command"], order["environment"]
    if isinstance(command, list) and isinstance(environment, dict):
        os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted


def _make_socket_directory() -> None:
    """Create or empty the directory as the server's account, never with root's rights.

    A socket's lock file contains a process id like postmaster.pid, and prevents the start if that id is in
    use again. No server is running here now, so all files are stale.
    """
    try:
        os.mkdir(SOCKET_DIRECTORY, 0o700, dir_fd=DATA_FD)
    except FileExistsError:
        directory = os.open(SOCKET_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=DATA_FD)
        for name in os.listdir(directory):
            os.unlink(name, dir_fd=directory)
        os.close(directory)


def _watch(home: str, postmaster: WatchedPostmaster, stop_requested: list[int]) -> None:
    users = _lock_file(home, "users.lock")
    start = _lock_file(home, "start.lock")
    log_due = time.monotonic()
    while not postmaster.has_ended():
        # If the server ends unexpectedly, the log has the cause, and users notice by their connections.
        if stop_requested or _has_no_users(users, start):
            postmaster.stop()
            return
        if time.monotonic() >= log_due:
            _limit_log(os.path.join(home, "postgres.log"))
            log_due += CHECK_LOG_EVERY_S
        time.sleep(CHECK_EVERY_S)


def _has_no_users(users: int, start: int) -> bool:
    """Whether there are no users and can't be any from now on: `start.lock` is then held until the end."""
    # Usually there are users, and `start.lock` isn't touched.
    if not _takes(users):
        return False
    fcntl.flock(users, fcntl.LOCK_UN)
    if not _takes(start):
        return False
    if _takes(users):
        return True
    fcntl.flock(start, fcntl.LOCK_UN)
    return False


def _lock_file(home: str, name: str) -> int:
    return os.open(os.path.join(home, name), os.O_RDWR | os.O_CREAT, 0o600)


def _takes(lock: int, *, patience: float = 0.0) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _limit_log(path: str) -> None:
    """Keep the end of a log that is too long; all writers append, so it can be truncated while in use."""
    try:
        size = os.stat(path).st_size
        if size <= LOG_LIMIT_BYTES:
            return
        with open(path, "rb") as log, open(path + ".1", "wb") as kept:
            log.seek(size - LOG_KEPT_BYTES)
            kept.write(log.read(LOG_KEPT_BYTES))
        os.truncate(path, 0)
    except OSError as error:
        os.write(2, f"lineshaft: the log could not be shortened: {error}\n".encode())


def _remove_link(directory: str) -> None:
    try:
        os.unlink(os.path.join(directory, SOCKET_DIRECTORY))
        os.rmdir(directory)
    except OSError:
        pass  # In use, or already removed.


if __name__ == "__main__":
    main()
