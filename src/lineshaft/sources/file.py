"""The operator's file of sources (LINESHAFT_SOURCES). docs/sources.md describes it."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.errors import InvalidInputError
from lineshaft.types.problems import invalid_input
from lineshaft.types.sources import NewSource
from lineshaft.types.written import check_numbers

_MAX_BYTES = 16 << 20


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    sources: list[NewSource]


def read(path: Path) -> list[NewSource]:
    """The sources of a file; raises InvalidInputError with what is wrong."""
    try:
        content = path.read_bytes()
        if len(content) > _MAX_BYTES:
            raise InvalidInputError(f"The file {path} is larger than {_MAX_BYTES} bytes.")
        return msgspec.convert(decode_yaml(content), _File).sources
    except OSError as error:
        raise InvalidInputError(f"Can't read {path}: {error.strerror or type(error).__name__}.") from None
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"The file {path} is not valid: {invalid_input(error)}.") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        mark = getattr(error.__context__, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise InvalidInputError(f"The file {path} is not valid YAML{where}.") from None


def decode_yaml(content: bytes) -> Any:
    found = msgspec.yaml.decode(content)
    check_numbers(found)
    for each in found.get("sources") or [] if isinstance(found, dict) else []:
        name_on(each)
    name_on(found)
    return found


def name_on(source: Any) -> None:
    """In YAML a bare `on` is a boolean; as a key, it is the field of a source."""
    if isinstance(source, dict) and True in source:
        source["on"] = source.pop(True)


def origin_of(path: Path) -> str:
    """The mark of sources that came from this file: only those are removed with it."""
    return f"file:{path.name}"
