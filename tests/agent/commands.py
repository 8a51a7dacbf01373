"""Shell scripts as agents, for tests."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lineshaft import Agent
from lineshaft.agent.exec import Command

#: As the page about agents shows it.
ASK = """
tell() { printf '%s\\n' "$1" >&"$LINESHAFT_FD"; }
ask() { tell "$1"; IFS= read -r answer <&"$LINESHAFT_FD"; printf '%s\\n' "$answer"; }
"""


class Commands:
    """Creates agents that run a shell script, and ends what they leave running."""

    def __init__(self, directory: Path, resources: ExitStack) -> None:
        self.directory = directory
        self.resources = resources

    def command(self, *arguments: str, **options: Any) -> Command:
        return self.resources.enter_context(Command(arguments, **options))

    def script(self, text: str, **options: Any) -> Command:
        path = self.directory / "script"
        path.write_text(f"#!/bin/sh\n{ASK}\n{text}\n")
        path.chmod(0o700)
        return self.command(str(path), **options)

    def agent(self, text: str, *, heartbeat_interval_sec: float = 10, **options: Any) -> Agent:
        agent = Agent("a", heartbeat_interval_sec=heartbeat_interval_sec)
        agent.task("t")(self.script(text, **options))
        return agent


@contextmanager
def commands_in(directory: Path) -> Iterator[Commands]:
    with ExitStack() as resources:
        yield Commands(directory, resources)
