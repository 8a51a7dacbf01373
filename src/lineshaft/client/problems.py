"""Refusals of a server as the exceptions that the database backend would have raised: class and words."""

from http import HTTPStatus

import msgspec

from lineshaft.errors import LineshaftError, PayloadTooLargeError, UnavailableError
from lineshaft.types import Problem

_decode = msgspec.json.Decoder(Problem).decode
_SERVER_FAULT = 500
#: What proxies say when they, or whoever is behind them, have too much to do.
_TRY_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


def exception_of(status: int, body: bytes, place: str) -> LineshaftError:
    """What an answer other than 2xx means; `place` is the server's address."""
    try:
        return _decode(body).exception
    except msgspec.MsgspecError:
        return strange(status, place)


def strange(status: int, place: str) -> LineshaftError:
    """An answer that makes no sense."""
    kind: type[LineshaftError] = LineshaftError
    if status >= _SERVER_FAULT or status in _TRY_LATER:
        kind = UnavailableError
    elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        kind = PayloadTooLargeError
    return kind(
        f"{place} answered {status}, and not as a Lineshaft server of this version does: something else is "
        "there, or in between. Check the URL (LINESHAFT_URL)."
    )
