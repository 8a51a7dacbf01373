"""`lineshaft demo`, as a newcomer runs it: real processes, one of them killed, and nothing left behind."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

import pytest

from lineshaft.cli.demo import look_around
from tests.terminals import CTRL_C, terminal


def demo(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    return subprocess.run(
        [sys.executable, "-m", "lineshaft.cli.main", "demo", *arguments],
        cwd=folder,
        env=environment | {"TMPDIR": str(folder)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow("the whole demo")
def test_the_demo_ends_well_on_its_own_and_leaves_nothing_behind() -> None:
    # Not pytest's own folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        # Settings of a production system that can't be reached: the demo must not use them.
        config = Path(folder, "lineshaft.toml")
        config.write_text('database_url = "postgresql://127.0.0.1:1/production"\n')
        done = demo(Path(folder), LINESHAFT_URL="http://127.0.0.1:1", LINESHAFT_DAILY_BUDGET_USD="0")
        left = list(Path(folder).iterdir())

    assert done.returncode == 0, done.stderr
    assert left == [config]
    assert "The DAG is complete" in done.stdout
    for failure in (" crash ", " rate_limit ", " invalid_output ", " auth_failure "):
        assert failure in done.stdout, "each mishap happened, and is in the table"
    table = done.stdout.split("TASK ")[1]
    assert table.count("COMPLETED") == 5
    # The search that was done before the crash was not done, nor paid, again.
    assert "researcher-1, researcher-2" in table or "researcher-2, researcher-1" in table
    assert "for 0.21 USD" in table


@pytest.mark.slow("the whole demo")
async def test_a_demo_that_is_kept_is_shown_in_the_dashboard_until_ctrl_c() -> None:
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        arguments = ("-m", "lineshaft.cli.main", "demo", "--keep", "kept")
        # Without a display, no browser is opened.
        display = {"DISPLAY": "", "WAYLAND_DISPLAY": ""}
        async with terminal(*arguments, directory=Path(folder), environment=display) as shown:
            await shown.prints("Stop       Ctrl-C")
            (address,) = re.findall(r"Dashboard  (http://127\.0\.0\.1:\d+/)", shown.text)
            page = await asyncio.to_thread(_get, f"{address}dags")
            await shown.press(CTRL_C)
            assert await shown.ends() == 0
        assert "Landing page for client X" in page
        assert "The data is in" in shown.text
        assert "lineshaft task list" in shown.text
        assert "postgres" in await asyncio.to_thread(os.listdir, f"{folder}/kept")


def _get(url: str) -> str:
    with urlopen(url, timeout=30) as response:  # noqa: S310 - of the process that was started here
        text: str = response.read().decode()
        return text


def test_a_demo_that_is_kept_without_a_terminal_names_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    look_around(tmp_path, "LINESHAFT_HOME=x")

    printed = capsys.readouterr().out
    assert "  export LINESHAFT_HOME=x\n" in printed
    assert "  lineshaft up   # the dashboard: http://127.0.0.1:8001/\n" in printed
