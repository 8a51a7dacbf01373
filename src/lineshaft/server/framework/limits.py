"""How large and how deep a request may be, and how many tasks it may have."""

import re

import msgspec
from msgspec import Struct

from lineshaft.engine.submit.drafts import MAX_BATCH, check_number
from lineshaft.errors import InvalidInputError, PayloadTooLargeError

#: Objects and arrays within each other.
MAX_DEPTH = 100

_OTHER = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_TEXTS = re.compile(rb'"[^"]*"')
_SHORTEST_TASK = len('{"type":""}')


class _Task(Struct, frozen=True, gc=False):
    children: "tuple[_Task, ...]" = ()


class _Tasks(Struct, frozen=True):
    tasks: tuple[_Task, ...] = ()
    #: Of a single one.
    children: tuple[_Task, ...] = ()


_count = msgspec.json.Decoder(_Tasks).decode


def too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The body has more than {limit} bytes (LINESHAFT_MAX_BODY_BYTES). Send less at once, or put large "
        "data into an artifact and name it."
    )


def check_depth(body: bytes) -> None:
    """Refuse JSON that is nested too deeply, before anything recurses into it.

    Takes a few passes over the bytes, whatever they are; whether they are JSON at all is seen later.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    brackets = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_AS_ARRAYS, _OTHER)
    # Two quotes side by side change nothing of what is inside a text; without them few are left to look at.
    brackets = _TEXTS.sub(b"", brackets.replace(b'""', b""))
    for _ in range(MAX_DEPTH):
        # Each pass takes away what contains nothing more.
        brackets, before = brackets.replace(b"[]", b""), brackets
        if len(brackets) == len(before):
            break
    # What is never closed counts too: the decoder would follow it down before it finds out.
    if b"[]" in brackets or brackets.count(b"[") > MAX_DEPTH:
        raise InvalidInputError(errors=[("", f"is nested more than {MAX_DEPTH} levels deep")])


def check_tasks(body: bytes) -> None:
    """Refuse more tasks than one call may have before they are made, which takes much longer than to count.

    What is wrong with the form of the body may be found here already: then it raises what the decoder does.
    """
    if len(body) > MAX_BATCH * _SHORTEST_TASK:
        found = _count(body)
        check_number(_number_of(found.tasks) + _number_of(found.children))


def _number_of(tasks: tuple[_Task, ...]) -> int:
    return len(tasks) + sum(_number_of(task.children) for task in tasks if task.children)
