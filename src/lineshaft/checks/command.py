"""The `test-pass` check: a command of the operator's accepts or rejects an output.

A task names a command, and the operator's file (LINESHAFT_VALIDATION_COMMANDS) defines it. The command runs
in the task's working directory without a shell, gets the task and its output as JSON on standard input, and
must exit with code 0 within its time limit. Its whole process group is killed at the limit, and when the
validator that started it dies.
"""

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from lineshaft.checks.verdict import PASSED, CandidateOutput, NoVerdict, Verdict, rejected
from lineshaft.child_environment import child_environment
from lineshaft.errors import SettingsError
from lineshaft.guardian import Guardian

DEFAULT_LIMIT_SEC = 300.0
LONGEST_LIMIT_SEC = 86_400.0
#: The last bytes of its output that are kept.
_TAIL_BYTES = 3_000
#: The time to wait for the output of a killed command: its descendants may hold the pipe open.
_PATIENCE_SEC = 5.0
#: A command starts when it gets the first line of input, after the guardian knows about it; a validator that
#: is killed before never writes that line. The shell reads only that line: the rest is for the command.
_WAIT_FOR_GO = ("/bin/sh", "-c", 'read -r go || exit; exec "$@"', "lineshaft")
_GO = b"go\n"
_KEYS = frozenset({"argv", "time_limit_sec", "directory", "pass_env"})


class CheckCommand(Struct, frozen=True):
    argv: tuple[str, ...]
    time_limit_sec: float = DEFAULT_LIMIT_SEC
    #: Contains the working directories of tasks, or is the working directory itself.
    directory: Path | None = None
    #: Variables of the validator that the command gets in addition to the usual ones.
    pass_env: tuple[str, ...] = ()


def read_commands(path: Path) -> dict[str, CheckCommand]:
    """Read the operator's file: NAME: {argv: [...], time_limit_sec: 300, directory: /where/tasks/work}.

    A relative path of a program starts at the folder of the file.
    """
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - slow to import; it has no types

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"Can't read the validation commands in {path}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must map names to commands, got {type(found).__name__}.")
    return {str(name): _command(path, str(name), entry) for name, entry in found.items()}


def _command(path: Path, name: str, entry: Any) -> CheckCommand:
    place = f"{path}: {name}"
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS:
        raise SettingsError(
            f"{place} must have argv, and optionally time_limit_sec, directory and pass_env; got {entry!r}."
        )
    argv, limit, directory = entry.get("argv"), entry.get("time_limit_sec"), entry.get("directory")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) and word for word in argv):
        raise SettingsError(f"{place}.argv must be a list of strings, the program first; got {argv!r}.")
    if limit is None:
        limit = DEFAULT_LIMIT_SEC
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= LONGEST_LIMIT_SEC:
        raise SettingsError(
            f"{place}.time_limit_sec must be seconds, at most {LONGEST_LIMIT_SEC:.0f}; got {limit!r}."
        )
    if directory is not None and not isinstance(directory, str):
        raise SettingsError(f"{place}.directory must be a path; got {directory!r}.")
    passed = entry.get("pass_env") or []
    if not isinstance(passed, list) or not all(isinstance(variable, str) for variable in passed):
        raise SettingsError(f"{place}.pass_env must be a list of names of variables; got {passed!r}.")
    program, *rest = argv
    if os.sep in program:
        # A relative path is the operator's: it starts at the file, not at the task's working directory.
        program = str(path.parent.absolute() / Path(program).expanduser())
    where = None if directory is None else Path(directory).expanduser()
    return CheckCommand((program, *rest), float(limit), where, tuple(passed))


class CommandCheck(Struct, frozen=True):
    commands: Mapping[str, CheckCommand]

    def fault(self, schema: Any) -> str | None:
        if not isinstance(schema, dict) or not schema.keys() <= {"command", "working_directory"}:
            return 'must be {"command": NAME}, optionally with a working_directory'
        name, directory = schema.get("command"), schema.get("working_directory")
        if not isinstance(name, str):
            return f'must be {{"command": NAME}}, where NAME is a string; got {type(name).__name__}'
        if name not in self.commands:
            allowed = ", ".join(sorted(self.commands)) or "none"
            return (
                f"command {name[:100]!r} is not allowed; allowed in LINESHAFT_VALIDATION_COMMANDS: {allowed}"
            )
        if directory is not None and not isinstance(directory, str):
            return f"working_directory must be a path, got {type(directory).__name__}"
        return None

    async def check(self, schema: Any, candidate: CandidateOutput) -> Verdict:
        name = schema["command"]
        command = self.commands.get(name)
        if command is None:
            raise NoVerdict(f"the command {name!r} is not allowed on this node")
        wanted = schema.get("working_directory") or candidate.spec_data.get("working_directory")
        directory = _directory(command, wanted)
        code, tail = await _run(command, directory, candidate)
        if code == 0:
            return PASSED
        how = (
            f"did not finish within {command.time_limit_sec:g} s and was killed"
            if code is None
            else f"ended with exit code {code}"
            if code > 0
            else f"was killed by signal {-code}"
        )
        return rejected(f"the command {name} {how}; last output: {tail.strip() or 'none'}")


def _directory(command: CheckCommand, wanted: Any) -> Path:
    """The working directory that the task names, if it is within the one that the operator allows."""
    root = (command.directory or Path.cwd()).resolve()
    if wanted is None:
        found = root
    else:
        try:
            found = (root / str(wanted)).resolve()
        except (OSError, ValueError) as error:
            raise NoVerdict(f"the working directory {wanted!r} can't be used: {error}") from None
    if not found.is_relative_to(root):
        raise NoVerdict(
            f"the working directory {wanted!r} is outside {str(root)!r}, where the command may run"
        )
    if not found.is_dir():
        raise NoVerdict(f"the working directory {str(found)!r} doesn't exist on this node")
    return found


async def _run(command: CheckCommand, directory: Path, candidate: CandidateOutput) -> tuple[int | None, str]:
    """The exit code (None: killed at the limit) and the end of its output."""
    # Keys and passwords of the server are not for a program that runs the work of tasks.
    environment = child_environment(os.environ, command.pass_env)
    environment |= {"LINESHAFT_TASK_ID": candidate.task_id, "LINESHAFT_TASK_TYPE": candidate.type}
    program = _program(command.argv[0], environment.get("PATH"))
    guardian = await asyncio.to_thread(_GUARDIANS.get)
    watch = _OutputTail()
    try:
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: watch,
            *_WAIT_FOR_GO,
            program,
            *command.argv[1:],
            cwd=directory,
            env=environment,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NoVerdict(f"the command {command.argv[0]!r} can't be started: {error}") from None
    group = transport.get_pid()
    code: int | None = None
    try:
        guardian.guard(group)
        # Input that it doesn't read is dropped when it ends.
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        stdin.write(_GO + _input(candidate))
        stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(command.time_limit_sec):
                await watch.exited.wait()
                code = transport.get_returncode()
    finally:
        # Kill the descendants it left behind, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        guardian.forget(group)
        await watch.exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SEC):
                await watch.silent.wait()
        transport.close()
    return code, watch.tail.decode(errors="replace")


def _program(name: str, path: str | None) -> str:
    """The path of the program: never one in the task's working directory, where a task could put its own.

    The waiting shell would only report an exit code for a missing program.
    """
    found = shutil.which(name, path=path)
    if found is None:
        raise NoVerdict(
            f"the command {name!r} can't be started: the program doesn't exist or isn't executable"
        )
    return str(Path(found).absolute())


class _Guardians:
    """The guardian of this process, started for the first command and replaced if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one: Guardian | None = None

    def get(self) -> Guardian:
        with self._lock:
            if self._one is None or not self._one.is_running:
                self._one = Guardian()
                atexit.register(self._one.close)
            return self._one


_GUARDIANS = _Guardians()


def _input(candidate: CandidateOutput) -> bytes:
    task = {
        "id": candidate.task_id,
        "type": candidate.type,
        "title": candidate.title,
        "spec": msgspec.Raw(candidate.spec),
    }
    return msgspec.json.encode({"task": task, "output": msgspec.Raw(candidate.output)})


class _OutputTail(asyncio.SubprocessProtocol):
    """Keeps the end of a process's output, and sees it exit even while others hold its pipes."""

    def __init__(self) -> None:
        self.tail = b""
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        del fd
        self.tail = (self.tail + data)[-_TAIL_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        del exc
        if fd == 1:
            self.silent.set()

    def process_exited(self) -> None:
        self.exited.set()
