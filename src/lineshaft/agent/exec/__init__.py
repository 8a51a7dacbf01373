"""A command as an agent: any program that reads a task and writes a result.

- `command` is the handler: what a program is given, and what its end means.
- `messages` is what a program can say while it runs, one JSON object a line.
- `process` is a program with everything it starts: its pipes, its end, and the end of what it left behind.

Programs whose agent was killed are ended by `lineshaft.guardian`.
"""

from lineshaft.agent.exec.command import Command

__all__ = ["Command"]
