"""Commands as agents: any program that reads a task and writes a result.

- `command` is the handler: what a program gets, and what its exit means.
- `account` is another account of this machine to run it under.
- `account_files` are the variables that it needs to use an account with a provider.
- `messages` is what a program can send while it runs, one JSON object per line.
- `process` is a program with everything it starts: its pipes, its exit, and cleaning up after it.

`lineshaft.guardian` ends the programs of an agent that was killed.
"""

from lineshaft.agent.exec.account import UnixAccount
from lineshaft.agent.exec.account_files import read_variables
from lineshaft.agent.exec.command import Command

__all__ = ["Command", "UnixAccount", "read_variables"]
