"""Ids that people type: whole, in their short form, or the first characters."""

import re
from typing import TYPE_CHECKING, Literal

from lineshaft.errors import LineshaftError, NotFoundError
from lineshaft.model.short_ids import is_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lineshaft.client.blocking import SyncLineshaft

#: The end of a short id, which alone finds nothing.
_END = re.compile(r"[0-9A-HJKMNP-TV-Z]{4}", re.IGNORECASE)
#: Candidates that an error names.
_NAMED = 5


def task_id(shaft: "SyncLineshaft", text: str) -> str:
    return _id(shaft, text, "task")


def task_ids(shaft: "SyncLineshaft", texts: "Iterable[str]") -> list[str]:
    return [task_id(shaft, text) for text in texts]


def dag_id(shaft: "SyncLineshaft", text: str) -> str:
    return _id(shaft, text, "dag")


def task_or_dag_id(shaft: "SyncLineshaft", text: str) -> str:
    return _id(shaft, text, None)


def _id(shaft: "SyncLineshaft", text: str, kind: Literal["task", "dag"] | None) -> str:
    if is_whole(text) or not text:
        return text
    found = shaft.find_ids(text, kind=kind)
    if len(found) > 1 and kind is None:
        # A standalone task and its DAG have the same short form and end together.
        found = [name for name in found if name.startswith("task_")] or found
    if len(found) > 1:
        raise ambiguous(text, found)
    if not found and _END.fullmatch(text):
        raise NotFoundError(
            f"There is no {kind or 'task or DAG'} {text!r}. If this is the end of a short id, use all of it, "
            f"such as J8K2M3N4-{text.upper()}."
        )
    # The call itself reports that it doesn't exist.
    return found[0] if found else text


def ambiguous(text: str, found: "Sequence[str]") -> LineshaftError:
    more = ", …" if len(found) > _NAMED else ""
    return LineshaftError(
        f"{text!r} means several ids: {', '.join(found[:_NAMED])}{more}. Use more characters of one of them."
    )
