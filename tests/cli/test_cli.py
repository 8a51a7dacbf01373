"""The command line, run as people run it: a process of its own, with the embedded database."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from lineshaft import NewTask, SyncLineshaft
from lineshaft.cli.doctor import _cannot_create
from lineshaft.embedded import describe

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `lineshaft` in a separate directory."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
        return subprocess.run(
            [sys.executable, "-m", "lineshaft.cli.main", *arguments],
            cwd=tmp_path,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.mark.slow("initdb")
def test_from_nothing_to_a_migrated_embedded_database(run: Run, tmp_path: Path) -> None:
    before = run("doctor")
    assert before.returncode == 0, before.stdout
    assert "not running; starts automatically" in before.stdout
    assert not (tmp_path / ".lineshaft").exists(), "doctor changes nothing"

    fresh = run("doctor", "--start")
    assert fresh.returncode == 0, fresh.stdout
    assert "applied automatically" in fresh.stdout
    assert run("migrate", "status").returncode == 1
    up = run("migrate", "up")
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("Applying 0001 schema …\n")
    assert re.search(r"\nApplied \d+ migrations?\. The database is up to date\.", up.stdout)
    assert "No pending migrations" in run("migrate", "up").stdout
    assert "has the expected schema" in run("migrate", "verify").stdout

    after = json.loads(run("doctor", "--start", "--json").stdout)
    assert after["problems"] == []
    assert set(after["schema"].values()) == {"applied"}
    assert after["database"]["data_major"] >= 14
    assert "password" not in after["database"]["dsn"]


def test_a_configured_database_is_used_instead(run: Run, dsn: str, tmp_path: Path) -> None:
    doctor = run("doctor", LINESHAFT_DATABASE_URL=dsn)

    assert doctor.returncode == 0, doctor.stdout
    assert "Schema      up to date" in doctor.stdout
    assert not (tmp_path / ".lineshaft").exists()
    assert json.loads(run("migrate", "up", "--json", LINESHAFT_DATABASE_URL=dsn).stdout) == {"applied": []}


@pytest.mark.slow("starts several processes")
def test_doctor_and_verify_report_problems(run: Run, empty_dsn: str) -> None:
    doctor = run("doctor", LINESHAFT_DATABASE_URL=empty_dsn)
    assert doctor.returncode == 1
    assert "Run 'lineshaft migrate up'" in doctor.stdout

    verify = run("migrate", "verify", LINESHAFT_DATABASE_URL=empty_dsn)
    assert verify.returncode == 1
    assert "Migration 0001 schema is pending." in verify.stdout
    assert "Run 'lineshaft migrate up'" in verify.stdout

    run("migrate", "up", LINESHAFT_DATABASE_URL=empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("ALTER TABLE lineshaft.task ADD COLUMN mine text")
    drifted = run("migrate", "verify", "--json", LINESHAFT_DATABASE_URL=empty_dsn)
    assert drifted.returncode == 1
    assert "+    mine text" in json.loads(drifted.stdout)["drift"]


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("command", [("doctor",), ("migrate", "up")])
def test_a_database_that_is_away_is_a_message_not_a_traceback(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, LINESHAFT_DATABASE_URL="postgresql://me:hunter2@127.0.0.1:1/x")

    text = result.stdout + result.stderr
    assert result.returncode == 1
    assert "Can't reach the database" in text
    assert "Traceback" not in text
    assert "hunter2" not in text


@pytest.mark.slow("starts processes")
def test_bad_settings_are_a_message_not_a_traceback(run: Run) -> None:
    result = run("migrate", "up", LINESHAFT_PORT="x", LINESHAFT_PROT="1")

    assert result.returncode == 1
    assert "LINESHAFT_PORT must be a whole number" in result.stderr
    assert "did you mean LINESHAFT_PORT?" in result.stderr
    assert "Traceback" not in result.stderr
    doctor = run("doctor", "--json", LINESHAFT_PORT="x")
    assert doctor.returncode == 1
    assert "LINESHAFT_PORT" in json.loads(doctor.stdout)["problems"][0]


@pytest.mark.slow("starts several processes")
def test_calling_it_wrongly_is_exit_code_2(run: Run) -> None:
    assert run().returncode == 2
    assert "COMMAND" in run().stderr
    assert run("nonsense").returncode == 2
    assert run("migrate").returncode == 2
    for arguments, expected in (
        (("task", "list", "--limit", "x"), "must be a whole number above 0, got 'x'"),
        (("up", "--port", "99999"), "must be a port from 0 to 65535, got '99999'"),
        (
            ("agent", "--exec", "true", "--type", "x", "--slots", "0"),
            "must be a whole number above 0, got '0'",
        ),
        (("agent", "--exec", "true", "--type", "x", "--grace", "x"), "seconds above 0, got 'x'"),
    ):
        wrong = run(*arguments)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert expected in wrong.stderr


def test_the_help_fits_a_terminal_of_80_columns(run: Run) -> None:
    shown = run("agent", "--help", COLUMNS="80").stdout

    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_help_and_version_dont_wait_for_heavy_imports() -> None:
    """The driver and the libraries of the server are imported only by commands that need them."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, lineshaft.cli.main; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert not {"psycopg", "asyncio", "msgspec", "rich", "lineshaft.embedded"} & set(loaded)


@pytest.mark.slow("initdb")
def test_the_server_stops_after_a_command(run: Run, tmp_path: Path) -> None:
    run("migrate", "up")
    deadline = time.monotonic() + 60

    while describe(tmp_path / ".lineshaft").pid is not None:
        assert time.monotonic() < deadline
    assert (tmp_path / ".lineshaft/postgres/PG_VERSION").exists()


@pytest.mark.slow("starts several processes")
def test_an_empty_database_is_one_line(run: Run, empty_dsn: str) -> None:
    for command in (
        ("submit", "research"),
        ("task", "list"),
        ("token", "create", "--name", "x", "--scope", "read"),
    ):
        result = run(*command, LINESHAFT_DATABASE_URL=empty_dsn)
        assert (result.returncode, result.stdout) == (1, "")
        assert re.fullmatch(r"lineshaft: .*Run 'lineshaft migrate up'.*\n", result.stderr), result.stderr


@pytest.mark.slow("starts several processes")
def test_a_newer_schema_is_used_and_not_judged(run: Run, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO lineshaft.migration (version, name, checksum, applied_at) "
            "VALUES (99, 'later', '', now())"
        )

    for command in (("submit", "research"), ("migrate", "up"), ("migrate", "status"), ("doctor",)):
        result = run(*command, LINESHAFT_DATABASE_URL=dsn)
        assert result.returncode == 0, result.stdout + result.stderr
    verified = run("migrate", "verify", LINESHAFT_DATABASE_URL=dsn)
    assert verified.returncode == 1
    assert "0099 later is unknown" in verified.stdout
    assert "Run 'lineshaft migrate verify' of that version" in verified.stdout


@pytest.mark.slow("starts processes")
def test_a_schema_that_breaks_this_version_is_refused(run: Run, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO lineshaft.migration (version, name, checksum, applied_at, breaks_older) "
            "VALUES (99, 'later', '', now(), true)"
        )

        result = run("submit", "research", LINESHAFT_DATABASE_URL=dsn)

        assert result.returncode == 1
        assert re.fullmatch(r"lineshaft: .*Upgrade Lineshaft.*\n", result.stderr), result.stderr
        assert connection.execute("SELECT count(*) FROM lineshaft.task").fetchone() == (0,)

    for command in (("doctor",), ("migrate", "verify")):
        result = run(*command, LINESHAFT_DATABASE_URL=dsn)
        assert result.returncode == 1
        assert "Upgrade Lineshaft" in result.stdout
        assert "migrate up" not in result.stdout, "it would be refused"


@pytest.mark.slow("measures several processes")
def test_a_list_takes_less_than_half_a_second_of_cpu(dsn: str, tmp_path: Path) -> None:
    """Compared with starting Python, so that it holds on slow and busy machines too."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"LINESHAFT_DATABASE_URL": dsn, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    command = [sys.executable, "-m", "lineshaft.cli.main", "task", "list"]

    def cpu_sec(*command: str) -> float:
        before = os.times()
        subprocess.run(command, env=environment, capture_output=True, check=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return float(used)

    cpu_sec(*command)  # compiles the modules
    bare = min(cpu_sec(sys.executable, "-c", "import asyncio, psycopg, msgspec") for _ in range(3))
    listing = min(cpu_sec(*command) for _ in range(3))

    assert listing < max(0.5, 4 * bare), f"{listing:.2f} s of CPU; Python with the driver alone: {bare:.2f} s"


@pytest.mark.slow("starts processes")
def test_a_list_imports_no_server(dsn: str) -> None:
    code = "import sys; from lineshaft.cli.main import main; main(['task', 'list']); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LINESHAFT_DATABASE_URL": dsn},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    heavy = {
        "starlette",
        "uvicorn",
        "jsonschema_rs",
        "re2",
        "yaml",
        "rich",
        "structlog",
        "lineshaft.embedded",
    }
    assert heavy & set(loaded) == set()


@pytest.mark.slow("starts several processes")
def test_commands_that_read_dont_create_a_database(run: Run, tmp_path: Path) -> None:
    for command in (
        ("task", "list"),
        ("why", "task_1"),
        ("events",),
        ("stats",),
        ("sql", "SELECT 1"),
        ("migrate", "status"),
        ("wait", "task_1"),
    ):
        result = run(*command)
        assert (result.returncode, result.stdout) == (1, ""), command
        assert f"There is no database in {tmp_path / '.lineshaft'}" in result.stderr
    doctor = run("doctor")
    assert (doctor.returncode, "created at first use" in doctor.stdout) == (0, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("starts processes")
def test_doctor_names_settings_that_need_redis(run: Run, dsn: str) -> None:
    doctor = run(
        "doctor", LINESHAFT_DATABASE_URL=dsn, LINESHAFT_REDIS_EVENTS="1", LINESHAFT_OFFICEPLANE_SSE="1"
    )

    assert doctor.returncode == 1
    for name in ("LINESHAFT_REDIS_EVENTS", "LINESHAFT_OFFICEPLANE_SSE"):
        assert f"{name} needs LINESHAFT_REDIS_URL." in doctor.stdout


def test_doctor_where_nothing_can_be_created(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    doctor = run("doctor", LINESHAFT_HOME=str(tmp_path / "file" / "home"))

    assert doctor.returncode == 1
    assert f"it can't be created: {tmp_path / 'file'} is not a folder" in doctor.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_doctor_in_a_folder_that_cant_be_written_to(tmp_path: Path) -> None:
    home = tmp_path / ".lineshaft"
    assert _cannot_create(home) is None

    os.seteuid(65534)
    try:
        fault = _cannot_create(home)
    finally:
        os.seteuid(0)

    assert fault is not None
    assert "can't be written to" in fault
    assert "LINESHAFT_HOME" in fault


@pytest.mark.slow("starts several processes")
def test_doctor_reads_every_configured_file(run: Run, dsn: str, tmp_path: Path) -> None:
    files = {
        "LINESHAFT_CIRCUIT_BREAKERS": "defaults: {failure_threshold: none}",
        "LINESHAFT_NOTIFICATIONS": "destinations: [{name: x, kind: unknown}]",
        "LINESHAFT_VALIDATION_COMMANDS": "tests: {argv: pytest}",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    variables = {name: str(tmp_path / name) for name in files}

    doctor = run("doctor", "--json", LINESHAFT_DATABASE_URL=dsn, **variables)

    assert doctor.returncode == 1
    problems = json.loads(doctor.stdout)["problems"]
    assert [name for name in files if any(variables[name] in problem for problem in problems)] == list(files)
    missing = run("doctor", LINESHAFT_DATABASE_URL=dsn, LINESHAFT_NOTIFICATIONS=str(tmp_path / "none.yaml"))
    assert (missing.returncode, "none.yaml" in missing.stdout) == (1, True)
    valid = tmp_path / "valid.yaml"
    valid.write_text("tests: {argv: [pytest]}")
    assert run("doctor", LINESHAFT_DATABASE_URL=dsn, LINESHAFT_VALIDATION_COMMANDS=str(valid)).returncode == 0


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize(
    "command",
    [
        ("events", "--follow", "--from-start"),
        ("wait", "TASK"),
        ("stats", "--watch"),
        ("submit", "y", "--wait"),
    ],
)
def test_ctrl_c_prints_no_traceback(dsn: str, command: tuple[str, ...]) -> None:
    with SyncLineshaft(dsn) as shaft:
        task = shaft.submit(NewTask("x"))
    words = [task.id if word == "TASK" else word for word in command]
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; from lineshaft.cli.entry import main; sys.exit(main())", *words],
        env=os.environ | {"LINESHAFT_DATABASE_URL": dsn, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, "it waits"

            process.send_signal(signal.SIGINT)

            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in first + rest


def test_a_list_over_http_imports_no_driver() -> None:
    """Instead of a limit in seconds, which a busy machine would exceed."""
    code = (
        "import sys; from lineshaft.cli.main import main\n"
        "main(['task', 'list', '--url', 'http://127.0.0.1:1']); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    heavy = {"psycopg", "starlette", "uvicorn", "yaml", "structlog", "rich", "jsonschema_rs"}
    assert heavy & {name.split(".")[0] for name in loaded.split()} == set()
