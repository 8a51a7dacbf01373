"""Error responses of a server as the exceptions that the database backend raises."""

from http import HTTPStatus

import msgspec

from lineshaft.errors import LineshaftError, PayloadTooLargeError, UnavailableError
from lineshaft.types import Problem

_decode = msgspec.json.Decoder(Problem).decode
_SERVER_FAULT = 500
#: What proxies return when they, or the server behind them, are overloaded.
_TRY_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


def exception_of(status: int, body: bytes, server: str) -> LineshaftError:
    """The exception for a response other than 2xx; `server` is the server's address."""
    try:
        return _decode(body).exception
    except msgspec.MsgspecError:
        return unexpected_response(status, server)


def unexpected_response(status: int, server: str) -> LineshaftError:
    kind: type[LineshaftError] = LineshaftError
    if status >= _SERVER_FAULT or status in _TRY_LATER:
        kind = UnavailableError
    elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        kind = PayloadTooLargeError
    return kind(
        f"Unexpected response {status} from {server}: it is not from a Lineshaft server of this version. "
        "Check the URL (LINESHAFT_URL) and any proxy in between."
    )
