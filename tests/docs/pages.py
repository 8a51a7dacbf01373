"""Runs a page of the documentation as a reader would: files are saved, commands are typed, in a new folder.

A block with a title is saved as a file of that name. A shell block is run; one with the title `Terminal N` is
a terminal of its own, which goes on until the end of the page, where Ctrl-C stops it. A text block with the
title `Output` shows what the shell block before it prints; `…` stands for anything. Nothing else is run.
"""

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
#: The default port, which `lineshaft up` has in the documentation. Here each page has one of its own.
_PORT = "8001"
#: Only guards against hanging.
_TIMEOUT_SEC = 120


class Block(NamedTuple):
    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.title or self.language})"

    @property
    def is_file(self) -> bool:
        return bool(self.title) and not self.is_terminal and self.title != "Output"

    @property
    def is_terminal(self) -> bool:
        return self.title.startswith("Terminal")


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2] or "", found[3])
        for found in _BLOCK.finditer(text)
    ]


def all_pages() -> list[str]:
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def environment(home: Path, programs: Path) -> dict[str, str]:
    """That of a new user: none of our settings, and none of Python's."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("LINESHAFT_", "PYTHON"))
    }
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PATH": path, "HOME": str(home), "NO_COLOR": "1", "COLUMNS": "80"}


@contextmanager
def followed(page: str, folder: Path, **options: Any) -> Iterator[None]:
    """Follow a page from top to bottom; its terminals are open while the context is."""
    reader = Page(folder, **options)
    try:
        for block in blocks(page):
            reader.run(block)
        yield
    finally:
        reader.close()


class Page:
    def __init__(
        self,
        folder: Path,
        *,
        programs: Path = Path(sys.executable).parent,
        user: str | None = None,
        variables: dict[str, str] | None = None,
        replaced: dict[str, str] | None = None,
    ) -> None:
        """`programs` has `python` and `lineshaft`; `user` types the commands, by default the tests' own."""
        self._folder = folder
        self._user = user
        self._port = str(reserved_port())
        #: What stands in the page, and what is used instead: ports.
        self._replaced = {_PORT: self._port} | (replaced or {})
        own = {"LINESHAFT_PORT": self._port} | (variables or {})
        self._environment = environment(folder.parent, programs) | own
        self._terminals: list[tuple[Block, subprocess.Popen[str]]] = []
        self._output = ""

    def run(self, block: Block) -> None:
        for printed, used in self._replaced.items():
            block = block._replace(text=block.text.replace(printed, used))
        if block.is_file:
            path = self._folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if self._user is not None:
                shutil.chown(path, self._user)
        elif block.is_terminal:
            self._terminals.append((block, self._start(block)))
            if "lineshaft up" in block.text:
                wait_for(f"http://127.0.0.1:{self._port}/readyz")
        elif block.language == "sh":
            with self._start(block) as running:
                try:
                    self._output, _ = running.communicate(timeout=_TIMEOUT_SEC)
                except subprocess.TimeoutExpired:
                    os.killpg(running.pid, signal.SIGKILL)
                    raise
            assert running.returncode == 0, f"{block} ended with {running.returncode}:\n{self._output}"
        elif block.title == "Output":
            assert matches(block.text, self._output), f"{block} differs from:\n{self._output}"

    def _start(self, block: Block) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", "-euc", block.text],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            user=self._user,
            group=None if self._user is None else pwd.getpwnam(self._user).pw_gid,
            extra_groups=None if self._user is None else [],
        )

    def close(self) -> None:
        """Type Ctrl-C in each terminal."""
        failed = []
        for block, running in reversed(self._terminals):
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGINT)
            try:
                output, _ = running.communicate(timeout=_TIMEOUT_SEC)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                output, _ = running.communicate()
            if running.returncode not in {0, 130, -signal.SIGINT} or "Traceback" in output:
                failed.append(f"{block} ended with {running.returncode}:\n{output}")
        assert not failed, "\n".join(failed)


def matches(expected: str, output: str) -> bool:
    """Whether the expected lines are in the output, in their order; spaces may differ."""
    position = 0
    squeezed = re.sub(r"[ \t]+", " ", output)
    for line in filter(None, map(str.strip, expected.splitlines())):
        parts = [re.escape(part) for part in re.sub(r"[ \t]+", " ", line).split("…")]
        found = re.compile(".*".join(parts)).search(squeezed, position)
        if found is None:
            return False
        position = found.end()
    return True


def wait_for(url: str, *, within_sec: float = 60) -> None:
    deadline = time.monotonic() + within_sec
    while True:
        with suppress(OSError), urllib.request.urlopen(url):  # noqa: S310 - our own server
            return
        assert time.monotonic() < deadline, f"{url} doesn't answer"
