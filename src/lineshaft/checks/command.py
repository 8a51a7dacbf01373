"""Whether a command of the operator's accepts an output: `test-pass`.

A task names a command; what that is, only the operator's file says (LINESHAFT_VALIDATION_COMMANDS). It runs
in the task's working directory without a shell, is given the task and its output as JSON on standard input,
and must end with exit code 0 within its time limit. At the limit its whole process group is killed; so it is
when the validator that started it dies.
"""

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml  # type: ignore[import-untyped]

from lineshaft.checks.verdict import PASSED, CandidateOutput, NoVerdict, Verdict, refused
from lineshaft.errors import SettingsError
from lineshaft.guardian import Guardian
from lineshaft.settings import PREFIX

DEFAULT_LIMIT_SEC = 300.0
LONGEST_LIMIT_SEC = 86_400.0
#: How much of the end of what it printed is kept.
_TAIL_BYTES = 3_000
#: Whoever is killed has gone by then; its pipes may be held open by what it left behind.
_PATIENCE_SEC = 5.0
#: A command begins when the first line comes, once the guardian knows of it; a validator that was killed
#: before never writes one. The shell reads no further than that line: the rest is the command's.
_WAIT_FOR_GO = ("/bin/sh", "-c", 'read -r go || exit; exec "$@"', "lineshaft")
_GO = b"go\n"


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    time_limit_sec: float = DEFAULT_LIMIT_SEC
    #: Working directories of tasks lie in here, or are this one.
    directory: Path | None = None


def read_commands(path: Path) -> dict[str, Command]:
    """The operator's file: NAME: {argv: [...], time_limit_sec: 300, directory: /where/tasks/work}."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"The validation commands in {path} can't be read: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must map names to commands, got {type(found).__name__}.")
    return {str(name): _command(path, str(name), entry) for name, entry in found.items()}


def _command(path: Path, name: str, entry: Any) -> Command:
    place = f"{path}: {name}"
    if not isinstance(entry, dict) or not entry.keys() <= {"argv", "time_limit_sec", "directory"}:
        raise SettingsError(
            f"{place} must have argv, and may have time_limit_sec and directory; got {entry!r}."
        )
    argv, limit, directory = entry.get("argv"), entry.get("time_limit_sec"), entry.get("directory")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) and word for word in argv):
        raise SettingsError(f"{place}.argv must be a list of texts, the program first; got {argv!r}.")
    if limit is None:
        limit = DEFAULT_LIMIT_SEC
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= LONGEST_LIMIT_SEC:
        raise SettingsError(
            f"{place}.time_limit_sec must be seconds, at most {LONGEST_LIMIT_SEC:.0f}; got {limit!r}."
        )
    if directory is not None and not isinstance(directory, str):
        raise SettingsError(f"{place}.directory must be a path; got {directory!r}.")
    return Command(tuple(argv), float(limit), None if directory is None else Path(directory).expanduser())


@dataclass(frozen=True, slots=True)
class CommandCheck:
    commands: Mapping[str, Command]

    def fault(self, schema: Any) -> str | None:
        if not isinstance(schema, dict) or not schema.keys() <= {"command", "working_directory"}:
            return 'must be {"command": NAME}, and may have a working_directory'
        name, directory = schema.get("command"), schema.get("working_directory")
        if not isinstance(name, str):
            return f'must be {{"command": NAME}}, with a text as the name; got {type(name).__name__}'
        if name not in self.commands:
            allowed = ", ".join(sorted(self.commands)) or "none"
            return (
                f"names the command {name[:100]!r}, which the operator doesn't allow "
                f"(LINESHAFT_VALIDATION_COMMANDS); allowed: {allowed}"
            )
        if directory is not None and not isinstance(directory, str):
            return f"working_directory must be a path, got {type(directory).__name__}"
        return None

    async def check(self, schema: Any, handed_in: CandidateOutput) -> Verdict:
        name = schema["command"]
        command = self.commands.get(name)
        if command is None:
            raise NoVerdict(f"the command {name!r} is not allowed on this node")
        wanted = schema.get("working_directory") or handed_in.spec_data.get("working_directory")
        directory = _directory(command, wanted)
        code, tail = await _run(command, directory, handed_in)
        if code == 0:
            return PASSED
        how = (
            f"did not end within {command.time_limit_sec:g} s and was killed"
            if code is None
            else f"ended with exit code {code}"
            if code > 0
            else f"was ended by signal {-code}"
        )
        return refused(f"the command {name} {how}; it said last: {tail.strip() or 'nothing'}")


def _directory(command: Command, wanted: Any) -> Path:
    """Where to run: what the task names, if that lies within what the operator allows."""
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
            f"the working directory {wanted!r} is not within {str(root)!r}, where the command may run"
        )
    if not found.is_dir():
        raise NoVerdict(f"the working directory {str(found)!r} doesn't exist on this node")
    return found


async def _run(command: Command, directory: Path, handed_in: CandidateOutput) -> tuple[int | None, str]:
    """The exit code (None: it was killed at the limit) and the end of what it printed."""
    # Our own settings have passwords in them, and are none of its business.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment |= {"LINESHAFT_TASK_ID": handed_in.task_id, "LINESHAFT_TASK_TYPE": handed_in.type}
    program = _program(command.argv[0], directory, environment.get("PATH"))
    guardian = await asyncio.to_thread(_GUARDIANS.get)
    watch = _Watch()
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
        # What it doesn't read is dropped when it ends.
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        stdin.write(_GO + _question(handed_in))
        stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(command.time_limit_sec):
                await watch.exited.wait()
                code = transport.get_returncode()
    finally:
        # What it started and left behind goes too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        guardian.forget(group)
        await watch.exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SEC):
                await watch.silent.wait()
        transport.close()
    return code, watch.tail.decode(errors="replace")


def _program(name: str, directory: Path, path: str | None) -> str:
    """Where the program is: the shell that waits for us would only say that it ended badly."""
    found = shutil.which(str(directory / name) if os.sep in name else name, path=path)
    if found is None:
        raise NoVerdict(
            f"the command {name!r} can't be started: there is no such program, or it can't be run"
        )
    return str(Path(found).absolute())


class _Guardians:
    """One for all commands of this process, from the first one on; a new one if somebody ended it."""

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


def _question(handed_in: CandidateOutput) -> bytes:
    task = {
        "id": handed_in.task_id,
        "type": handed_in.type,
        "title": handed_in.title,
        "spec": msgspec.Raw(handed_in.spec),
    }
    return msgspec.json.encode({"task": task, "output": msgspec.Raw(handed_in.output)})


class _Watch(asyncio.SubprocessProtocol):
    """Keeps the end of what a process prints, and knows when it has ended, whoever still holds its pipes."""

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
