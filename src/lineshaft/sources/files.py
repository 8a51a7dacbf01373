"""Files under a folder that match patterns, without following symbolic links."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

#: Files of one source; a folder with more is refused.
MAX_FILES = 100_000
_PIECE = 1 << 20


class FolderError(Exception):
    """A folder that must not be watched, or can't be."""


class FoundFile(NamedTuple):
    #: Relative to the root, with slashes.
    path: str
    size: int
    modified_ns: int


def allowed_root(root: str, folders: Sequence[str]) -> Path:
    """The folder to watch; raises FolderError unless it is in one of the allowed ones."""
    path = Path(root)
    if not path.is_absolute():
        raise FolderError(f"root must be an absolute path, got {root!r}")
    # Links anywhere in the path count as what they lead to.
    real = Path(os.path.realpath(path))
    if real != Path(os.path.normpath(path)):
        raise FolderError(f"root {root!r} leads through a symbolic link")
    if not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise FolderError(f"root {root!r} is not in a folder of LINESHAFT_SOURCE_FOLDERS")
    if not real.is_dir():
        raise FolderError(f"root {root!r} is not a folder")
    return real


def scan(root: Path, patterns: Sequence[str]) -> Iterator[FoundFile]:
    """Regular files that match; symbolic links are left out, and not followed."""
    wanted = [_regex(pattern) for pattern in patterns]
    found = 0
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if not any(pattern.fullmatch(relative) for pattern in wanted):
                continue
            try:
                about = path.lstat()
            except OSError:
                continue  # it is gone
            if not stat.S_ISREG(about.st_mode):
                continue
            found += 1
            if found > MAX_FILES:
                raise FolderError(f"root {str(root)!r} has more than {MAX_FILES} matching files")
            yield FoundFile(relative, about.st_size, about.st_mtime_ns)


def digest(root: Path, path: str) -> str | None:
    """The digest of the content; None: it can't be read, or has become a link."""
    hashed = hashlib.sha256()
    try:
        descriptor = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as content:
            while piece := content.read(_PIECE):
                hashed.update(piece)
    except OSError:
        return None
    return hashed.hexdigest()


@lru_cache(maxsize=1_024)
def _regex(pattern: str) -> re.Pattern[str]:
    """`*` and `?` match within a name, `**/` any number of folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    signs = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(signs.get(part, re.escape(part)) for part in parts), re.DOTALL)
