"""Tracebacks for people: the frames of their own code and of the libraries it calls, without values."""

import os
from pathlib import Path
from traceback import TracebackException, extract_tb

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


def _leave_out_own(described: TracebackException) -> None:
    frames = [frame for frame in described.stack if not frame.filename.startswith(_HIDDEN)]
    # An error inside of Lineshaft keeps its frames.
    if frames:
        described.stack[:] = frames
    for other in (described.__cause__, described.__context__, *(described.exceptions or ())):
        if other is not None:
            _leave_out_own(other)
