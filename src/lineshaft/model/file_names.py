"""Names and media types of files that come from elsewhere: data, never paths or headers as they are."""

import mimetypes
import re

from lineshaft.model.storable import replace_unstorable

MAX_NAME = 1_000
UNKNOWN_TYPE = "application/octet-stream"
#: What most file systems allow.
_MAX_FILE_NAME_BYTES = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MEDIA_TYPE = re.compile(
    r"[\w!#$&^.+-]+/[\w!#$&^.+-]+(?:\s*;\s*[\w!#$&^.+-]+=(?:[\w!#$&^.+-]+|\"[\w !#$&^.+/-]*\"))*", re.ASCII
)


def stored_name(name: str) -> str:
    """The name as it is stored and shown: text without control characters, cut to a thousand characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", replace_unstorable(name))[:MAX_NAME] or "unnamed"


def safe_file_name(name: str) -> str:
    """A name for a file in a folder of our choice: one component, never hidden, never too long."""
    last = re.split(r"[/\\]", _CONTROL.sub("_", replace_unstorable(name)))[-1].strip()
    if not last.strip("."):
        return "unnamed"
    if last.startswith("."):
        last = f"_{last}"
    stem, dot, suffix = last.rpartition(".")
    if not stem or len(suffix.encode()) > _MAX_FILE_NAME_BYTES // 4:
        stem, dot, suffix = last, "", ""
    room = _MAX_FILE_NAME_BYTES - len((dot + suffix).encode())
    return stem.encode()[:room].decode(errors="ignore") + dot + suffix


def media_type(given: str | None, name: str) -> str:
    """The given type, if it is one; else by the name."""
    if given and len(given) <= MAX_NAME and _MEDIA_TYPE.fullmatch(given.strip()):
        return given.strip()
    if given:
        return UNKNOWN_TYPE
    return mimetypes.guess_type(safe_file_name(name), strict=False)[0] or UNKNOWN_TYPE
