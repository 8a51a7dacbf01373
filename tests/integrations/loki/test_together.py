"""Real processes around one folder: document 000's bash, `lineshaft agent`, servers that are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.integrations.loki.readers import places, put

pytestmark = pytest.mark.slow("servers, agents and shells as processes")

#: As document 000 prints it, in a function.
CLAIM = """
QUEUE_FILE=".loki/queue/pending.json"
LOCK_FILE=".loki/state/locks/queue.lock"
claim() {
(
  flock -x -w 10 200 || exit 1

  # Read, claim, write atomically
  TASK=$(jq -r '.tasks | map(select(.claimedBy == null)) | .[0]' "$QUEUE_FILE")
  if [ "$TASK" != "null" ]; then
    TASK_ID=$(echo "$TASK" | jq -r '.id')
    jq --arg id "$TASK_ID" --arg agent "$AGENT_ID" \\
      '.tasks |= map(if .id == $id then .claimedBy = $agent | .claimedAt = now else . end)' \\
      "$QUEUE_FILE" > "${QUEUE_FILE}.tmp" && mv "${QUEUE_FILE}.tmp" "$QUEUE_FILE"
    echo "$TASK_ID"
  fi

) 200>"$LOCK_FILE"
}
"""
#: The record stays in pending until the mirror has moved it.
WORK = (
    CLAIM
    + """
while [ ! -e stop ]; do
  ID=$(claim)
  if [ -z "$ID" ]; then sleep 0.05; continue; fi
  echo "$ID" >> ran-by-shell
  until "$PYTHON" -m lineshaft loki complete .loki "$ID" --result result.json >/dev/null 2>&1
  do sleep 0.1; done
done
"""
)


AGENT = """
echo "$LINESHAFT_TASK_ID" >> ran-by-agent
echo '%s' >&$LINESHAFT_FD
sleep 0.2
echo done
"""


@contextmanager
def process(
    arguments: list[str], folder: Path, dsn: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    environment = inherited | {"LINESHAFT_DATABASE_URL": dsn, "PYTHON": sys.executable} | variables
    with (folder / f"{len(list(folder.glob('log-*')))}-log").open("wb") as log:
        started = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def until(check: Any, within_sec: float = 250) -> None:
    """The limit only guards against hanging."""
    deadline = time.monotonic() + within_sec
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@pytest.mark.skipif(
    not (shutil.which("jq") and shutil.which("flock")), reason="document 000's bash needs jq and flock"
)
def test_bash_and_agents_drain_one_folder(dsn: str, connection: psycopg.Connection, tmp_path: Path) -> None:
    """The proof of loki.md: each task runs once, in a script or in an agent."""
    names = [f"t{number}" for number in range(16)]
    put(
        tmp_path / ".loki",
        "pending",
        {"tasks": [{"id": name, "type": "x", "payload": {"n": name}} for name in names]},
    )
    report = {"why": "asked", "what": "done", "tradeoffs": "none"}
    (tmp_path / "result.json").write_text(json.dumps({"output": "sh", "decisionReport": report}))
    (tmp_path / "agent.sh").write_text(AGENT % json.dumps({"decision_report": report}))
    with ExitStack() as running:

        def start(*arguments: str, **variables: str) -> None:
            running.enter_context(process(list(arguments), tmp_path, dsn, **variables))

        start(sys.executable, "-m", "lineshaft", "loki", "mirror", ".loki")
        for number in range(2):
            start("bash", "-c", WORK, AGENT_ID=f"shell-{number}")
        command = ["agent", "--exec", "bash agent.sh", "--type", "x", "--slots", "1", "--id", "native"]
        start(sys.executable, "-m", "lineshaft", *command)

        def done() -> bool:
            return _count(connection, "COMPLETED") == len(names)

        until(done)
        # The mirror's files follow.
        until(lambda: set(map(tuple, places(tmp_path / ".loki").values())) == {("completed",)})
        (tmp_path / "stop").touch()
    ran = Counter(lines(tmp_path / "ran-by-shell") + lines(tmp_path / "ran-by-agent"))

    assert ran == dict.fromkeys(names, 1)
    assert lines(tmp_path / "ran-by-shell"), "shells took some"
    assert lines(tmp_path / "ran-by-agent"), "agents took some"
    found = connection.execute("SELECT attempts FROM lineshaft.tasks").fetchall()
    assert {attempts for (attempts,) in found} == {0}


def _count(connection: psycopg.Connection, status: str) -> int:
    found = connection.execute("SELECT count(*) FROM lineshaft.tasks WHERE status = %s", [status]).fetchone()
    assert found is not None
    return int(found[0])


def test_mirrors_are_killed_and_the_files_always_parse(
    dsn: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    """Two servers on one folder, one of which is killed again and again: nothing is lost or doubled."""
    root = tmp_path / ".loki"
    names = [f"t{number}" for number in range(300)]
    put(root, "pending", [{"id": name, "type": "x", "payload": {"n": name}} for name in names[:100]])
    mirror = [sys.executable, "-m", "lineshaft", "loki", "mirror", ".loki"]
    for delay in (1.0, 1.3, 1.1, 1.5):
        with process(mirror, tmp_path, dsn) as one, process(mirror, tmp_path, dsn):
            # What varies is the moment of the death, wherever the work is then.
            time.sleep(delay)
            one.send_signal(signal.SIGKILL)
            one.wait()
            for name in ("pending", "in-progress", "completed", "dead-letter", "cancelled"):
                path = root / "queue" / f"{name}.json"
                if path.exists():
                    json.loads(path.read_text())
        for held in root.glob("queue/.*.lockdir"):  # as if 30 s had passed
            os.utime(held, (1, 1))

    with process(mirror, tmp_path, dsn):
        until(
            lambda: (
                len(places(root)) == 100
                and _count(connection, "READY") + _count(connection, "CLAIMED") == 100
            )
        )
    assert set(places(root)) == set(names[:100])
