"""The folders of an attempt: `LINESHAFT_INPUTS` with the task's artifacts, `LINESHAFT_OUTPUTS` for new ones.

Both belong to the attempt and are deleted after it. The agent holds a lock while it uses them, so that the
next agent can delete what one that was killed left behind.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lineshaft.agent.context import TaskContext, execution_of
from lineshaft.agent.exec.account import UnixAccount
from lineshaft.agent.outcome import Fail
from lineshaft.client.artifacts import Artifacts
from lineshaft.client.large_data import patiently
from lineshaft.model.file_names import safe_file_name
from lineshaft.model.retry import FailureCategory
from lineshaft.settings import INPUTS_VARIABLE, OUTPUTS_VARIABLE
from lineshaft.types.artifacts import REF_PREFIX

_PREFIX = "lineshaft-attempt-"
_LOCK = ".lock"
MAX_FILES = 1_000


class AttemptFiles:
    def __init__(self, folder: Path, account: UnixAccount | None) -> None:
        self._account = account
        self._inputs, self._outputs = folder / "inputs", folder / "outputs"

    @property
    def variables(self) -> dict[str, str]:
        return {INPUTS_VARIABLE: str(self._inputs), OUTPUTS_VARIABLE: str(self._outputs)}

    def create(self) -> None:
        if self._account is not None:
            # The account must get through to its folders; it can't list this one.
            self._inputs.parent.chmod(0o711)
        for folder in (self._inputs, self._outputs):
            folder.mkdir(mode=0o700)
        self._hand_over(self._outputs)

    def _hand_over(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid, follow_symlinks=False)

    async def fetch(self, ctx: TaskContext, artifacts: Artifacts) -> None:
        """Write the artifacts among the task's inputs to files, each under its own name."""
        taken: set[str] = set()
        for ref, artifact in ctx.inputs.items():
            if not ref.startswith(REF_PREFIX) or artifact is None:
                continue
            name = safe_file_name(artifact["name"])
            if name in taken:
                name = f"{artifact['id']}-{name}"
            taken.add(name)
            target = self._inputs / name
            await patiently(partial(artifacts.save, ref, target), execution_of(ctx).lease.is_gone)
            self._hand_over(target)
        # Last: until then no program of the account can put links there, which the agent would follow.
        self._hand_over(self._inputs)

    async def store(self, ctx: TaskContext) -> None:
        """Upload what the command wrote, by its path within the folder."""
        count = 0
        for name, file in self._written():
            # It is closed here, also if the upload fails.
            with os.fdopen(file, "rb") as opened:
                count += 1
                if count > MAX_FILES:
                    raise Fail(
                        f"The command wrote more than {MAX_FILES} files to {OUTPUTS_VARIABLE}. Put them into "
                        "an archive.",
                        FailureCategory.INVALID_OUTPUT,
                    )
                await patiently(partial(_upload, ctx, name, opened), execution_of(ctx).lease.is_gone)

    def _written(self) -> Iterator[tuple[str, int]]:
        """Regular files of the command's account, in order. Links are skipped: they may lead anywhere."""
        owner = os.getuid() if self._account is None else self._account.uid
        for folder, below, names, at in os.fwalk(self._outputs, follow_symlinks=False):
            below.sort()
            for name in sorted(names):
                try:
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
                except OSError:
                    continue
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode) and status.st_uid == owner:
                    yield str(Path(folder).relative_to(self._outputs) / name), file
                else:
                    os.close(file)


async def _upload(ctx: TaskContext, name: str, file: BinaryIO) -> None:
    file.seek(0)
    await ctx.put_artifact(name, file)


@asynccontextmanager
async def attempt_files(account: UnixAccount | None) -> AsyncIterator[AttemptFiles]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=_PREFIX))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        files = AttemptFiles(folder, account)
        files.create()
        yield files
    finally:
        # The lock is released later: without it, another agent would delete the folder too.
        await asyncio.shield(asyncio.to_thread(_delete, folder))
        os.close(lock)


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return
    # Commands leave folders that only have to be read, as caches do. Only root can delete them as they are.
    for at, below, _ in os.walk(folder):
        for name in below:
            path = Path(at, name)
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def delete_left_behind() -> None:
    """Delete the folders of agents of this account that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or not folder.is_dir():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(folder)
            finally:
                os.close(lock)
