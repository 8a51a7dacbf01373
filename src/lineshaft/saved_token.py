"""The token that clients on this machine use: a file in LINESHAFT_HOME that only its owner can read."""

import contextlib
import os
from pathlib import Path

from lineshaft.errors import SettingsError
from lineshaft.settings import TOKEN

_NAME = "token"
_OWNER_ONLY = 0o600


def path_of(home: Path) -> Path:
    return home / _NAME


def save_token(home: Path, token: str) -> Path:
    """Write the token, in place of an earlier one; returns where."""
    path = path_of(home)
    # Written beside it and renamed: a reader sees one of the two tokens, whole, and no other account either.
    new = path.with_name(f"{_NAME}.{os.getpid()}")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        new.replace(path)
    except OSError as error:
        raise SettingsError(
            f"The token was created, but can't be saved in {path}: {error.strerror or error}. Save the token "
            "that was printed yourself, or check LINESHAFT_HOME and create another."
        ) from error
    return path


def saved_token(home: Path) -> str | None:
    """The saved token; None: there is none, or it belongs to another account."""
    path = path_of(home)
    try:
        text = path.read_text(encoding="ascii").strip()
        return TOKEN.parse(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError):
        raise SettingsError(
            f"{path} must contain a token: {TOKEN.words}. Create another with 'lineshaft token create "
            "--save', or delete the file."
        ) from None


def is_readable(home: Path) -> bool:
    """Whether this account, and so a program that it starts, can read a saved token."""
    return os.access(path_of(home), os.R_OK)
