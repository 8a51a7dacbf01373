"""Environment files: what a command needs to use an account, such as a key or the folder of a login.

A line is `NAME=VALUE`, as `docker --env-file` and shells read it: `export` before it, quotes around the value
and comments are allowed. A file is read for each task, so that a login may be renewed while the agent runs.
"""

import re
from pathlib import Path

from lineshaft.errors import LineshaftError

_LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")


def read_variables(path: Path) -> dict[str, str]:
    """The variables in an environment file. Errors don't show its values."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LineshaftError(f"The environment file {path} can't be read: {error}.") from None
    variables = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if (match := _LINE.fullmatch(line)) is None:
            raise LineshaftError(f"Line {number} of the environment file {path} is not NAME=VALUE.")
        value = match["value"].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[match["name"]] = value
    return variables
