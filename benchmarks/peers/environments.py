"""An environment for each peer, with exactly the versions of its requirements file."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).parent
ROOT = _HERE.parent.parent
_CACHE = _HERE.parent / ".environments"
_PATIENCE_SEC = 600


def python_for(name: str, step: Callable[[str], None]) -> Path:
    """The Python that has this peer; its environment is made when it isn't there or has other versions."""
    requirements = _HERE / "requirements" / f"{name}.txt"
    environment = _CACHE / name
    python = environment / "bin" / "python"
    stamp = environment / "installed.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    step(f"installing {name}")
    shutil.rmtree(environment, ignore_errors=True)
    if uv := shutil.which("uv"):
        _run(uv, "venv", "--quiet", "--python", sys.executable, environment)
        _run(uv, "pip", "install", "--quiet", "--python", python, "--requirement", requirements)
    else:
        _run(sys.executable, "-m", "venv", environment)
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        _run(*pip, "install", "--requirement", requirements)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def version_of(name: str) -> str:
    lines = (_HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines)[name]


def _run(*command: str | Path) -> None:
    done = subprocess.run(  # noqa: S603 - commands of this file's own
        [str(word) for word in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SEC,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr or done.stdout}")
