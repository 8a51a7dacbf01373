import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lineshaft.cli.main import main


@dataclass(frozen=True, slots=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Said]


@pytest.fixture
def cli(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls a command, as a process would, over the test's own database."""
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)
    monkeypatch.delenv("LINESHAFT_URL", raising=False)

    def call(*arguments: str) -> Said:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as exit_:  # argparse, when it was called wrongly
            code = int(exit_.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call
