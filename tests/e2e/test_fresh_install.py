"""README and quick start, followed literally on the built wheel, without the repository."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, followed
from tests.embedded.helpers import stop_server

PAGES = ("README.md", "docs/quick-start.md")
#: An ordinary account that every system has.
ORDINARY = "nobody"
SYSTEM_PYTHON = Path("/usr/bin/python3")


def run(*command: str | Path) -> None:
    subprocess.run([str(each) for each in command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.slow("installs a wheel and its dependencies, and runs two pages twice")
def test_readme_and_quick_start_as_root_and_as_an_ordinary_user() -> None:
    python = SYSTEM_PYTHON if SYSTEM_PYTHON.exists() and os.getuid() == 0 else Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="fresh-") as made:
        top = Path(made)
        top.chmod(0o755)
        pip = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check")
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", top, ".")
        run(python, "-m", "venv", "--without-pip", top / "venv")
        programs = top / "venv" / "bin"
        install = (*pip, "--python", programs / "python", "install")
        run(*install, "--require-hashes", "--requirement", "requirements/package.txt")
        run(*install, "--no-deps", next(top.glob("*.whl")))
        for user in [None, ORDINARY] if os.getuid() == 0 else [None]:
            for page in PAGES:
                home = top / (user or "owner") / Path(page).stem
                work = home / "work"
                work.mkdir(parents=True)
                if user is not None:
                    shutil.chown(home, user)
                    shutil.chown(work, user)
                try:
                    with followed(page, work, programs=programs, user=user):
                        pass
                finally:
                    stop_server(work / ".lineshaft")
