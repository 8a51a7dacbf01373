"""Texts from hostile submitters in the terminals of people, and hostile files and settings."""

import asyncio
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lineshaft import Lineshaft, NewTask
from tests.e2e.conftest import ROOT

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e\r"
FORBIDDEN = (b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b", "\u202e".encode())
MIB = 1 << 20


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    return kept | {"PYTHONPATH": str(ROOT / "src")} | variables


def on_a_terminal(*arguments: str, **variables: str) -> bytes:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lineshaft.cli.main", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM="xterm", **variables)
    ):
        os.close(theirs)
        said = b""
        while True:
            try:
                said += (part := os.read(ours, 1 << 16))
            except OSError:  # the last process has closed it
                break
            if not part:
                break
    os.close(ours)
    return said


@pytest.mark.slow("starts a process for each command")
async def test_control_characters_never_reach_a_terminal(dsn: str) -> None:
    async with Lineshaft(dsn) as shaft:
        made = await shaft.submit(
            NewTask("t", title=f"t {ATTACK}", tags=[ATTACK], spec={ATTACK: ATTACK}, created_by="human:a")
        )
    for command in (
        ("task", "list"),
        ("task", "show", made.id),
        ("task", "show", made.id, "--json"),
        ("why", made.id),
        ("events",),
        ("task", "show", ATTACK),
        (
            "agent",
            "--exec",
            "printf '\\033]0;owned\\007\\033[2J\\n' >&2",
            "--shell",
            "--type",
            "t",
            "--until-idle",
        ),
        ("task", "show", made.id),
    ):
        said = await asyncio.to_thread(on_a_terminal, *command, LINESHAFT_DATABASE_URL=dsn)

        assert said.strip(), command
        assert not any(found in said for found in FORBIDDEN), (command, said)


@pytest.mark.slow("starts a process")
def test_the_log_of_a_server_on_a_terminal() -> None:
    program = (
        "import io, logging, sys; from lineshaft import logs; logs.configure('text');"
        "log = logging.getLogger('x'); attack = sys.argv[1]; log.warning('path %s', attack);\n"
        "try: raise ValueError(attack)\n"
        "except ValueError: log.exception(attack)"
    )
    for log_format in ("text", "json"):
        code = program.replace("'text'", repr(log_format))
        said = subprocess.run(
            [sys.executable, "-c", code, ATTACK], env=environment(), capture_output=True, check=True
        ).stderr

        assert b"owned" in said
        assert not any(found in said for found in FORBIDDEN), said


@pytest.mark.slow("starts a process for each")
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:one@SECRET@127.0.0.1:1/x",
        "postgresql://me:SECRET/two@127.0.0.1:1/x",
        "postgresql://me:%SECRET@127.0.0.1:1/x",
        "host=127.0.0.1 port=1 password=one SECRET",
        "postgresql://me:SECRET@127.0.0.1:port/x",
    ],
)
@pytest.mark.parametrize(
    "command", [("stats",), ("up", "--port", "0"), ("agent", "--exec", "true", "--type", "t")]
)
def test_a_malformed_database_url_is_not_quoted(url: str, command: tuple[str, ...]) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "lineshaft.cli.main", *command],
        env=environment(LINESHAFT_DATABASE_URL=url),
        capture_output=True,
        check=False,
        text=True,
    )

    assert said.returncode == 1
    assert "LINESHAFT_DATABASE_URL is not valid" in said.stderr
    assert "SECRET" not in said.stdout + said.stderr
    assert "Traceback" not in said.stderr


def levels(number: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, number)]
    return "\n".join(["type: t", "spec:", *(f"  {line}" for line in lines)])


def merges(number: int) -> str:
    lines = ["m0: &m0 {a: 1, b: 2}"]
    lines += [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, number)]
    return "\n".join(["type: t", "spec:", *(f"  {line}" for line in lines)])


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize(
    "text",
    [levels(9), merges(9), "type: t\nspec: &s {a: *s}", "type: t\nspec: " + "[" * 5_000, "- " * 50_000],
    ids=["aliases", "merges", "itself", "deep", "deep lists"],
)
def test_a_file_that_expands(tmp_path: Path, dsn: str, text: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (600 * MIB, 600 * MIB))

    said = subprocess.run(
        [sys.executable, "-m", "lineshaft.cli.main", "submit", "--file", str(path)],
        env=environment(LINESHAFT_DATABASE_URL=dsn),
        preexec_fn=limit,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )

    assert said.returncode == 2, said.stderr
    assert str(path) in said.stderr
    assert "Unexpected" not in said.stderr


@pytest.mark.slow("starts a process")
def test_a_file_with_a_few_aliases(tmp_path: Path, dsn: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("type: t\nspec:\n  a: &a {x: 1}\n  b: *a\n  c: {<<: *a, y: 2}\n")

    said = subprocess.run(
        [sys.executable, "-m", "lineshaft.cli.main", "submit", "--file", str(path)],
        env=environment(LINESHAFT_DATABASE_URL=dsn),
        capture_output=True,
        check=False,
        text=True,
    )

    assert said.returncode == 0, said.stderr


@pytest.mark.slow("a program writes 30 MB")
async def test_a_program_that_floods_standard_error(dsn: str, tmp_path: Path) -> None:
    async with Lineshaft(dsn) as shaft:
        await shaft.submit(NewTask("t"))
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lineshaft.cli.main", "agent", "--type", "t", "--until-idle", "--shell"),
            *("--exec", "yes | head -c 30000000 >&2; echo done"),
            env=environment(LINESHAFT_DATABASE_URL=dsn),
            stderr=errors,
        )
        async with asyncio.timeout(60):
            assert await process.wait() == 0

    assert b"lines left out" in log.read_bytes()
    assert log.stat().st_size < MIB
