"""Tracebacks for people: the frames of their own code and of the libraries it calls, without values."""

import os
from pathlib import Path
from traceback import TracebackException, extract_tb
from types import FrameType

_OWN = f"{Path(__file__).parent}/"
_LIBRARY = Path(os.__file__).parent
_ASYNCIO = f"{_LIBRARY}/asyncio/"
#: Frames that say nothing about the error.
_HIDDEN = (_OWN, "<frozen importlib", f"{_LIBRARY}/importlib/")


def user_traceback(error: BaseException) -> str:
    """The traceback of an error and of its causes, without frames of Lineshaft and of imports."""
    described = TracebackException.from_exception(error, compact=True)
    _leave_out_own(described)
    if isinstance(error, SyntaxError) and not has_user_frames(error):
        # Its place is in the error itself.
        described.stack.clear()
    return "".join(described.format())


def has_user_frames(error: BaseException) -> bool:
    """Whether it passed through code that is neither Lineshaft's nor the event loop's."""
    return any(
        not frame.filename.startswith((*_HIDDEN, _ASYNCIO)) for frame in extract_tb(error.__traceback__)
    )


def user_frame(frame: FrameType | None) -> str | None:
    """Where a thread is, in the innermost code that isn't a library's; None: nowhere."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_HIDDEN, f"{_LIBRARY}/", "<frozen ")) and "/site-packages/" not in name:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _leave_out_own(described: TracebackException) -> None:
    frames = [frame for frame in described.stack if not frame.filename.startswith(_HIDDEN)]
    # An error inside of Lineshaft keeps its frames.
    if frames:
        described.stack[:] = frames
    for other in (described.__cause__, described.__context__, *(described.exceptions or ())):
        if other is not None:
            _leave_out_own(other)
