"""The choice between a database and a server."""

from dataclasses import replace
from typing import TYPE_CHECKING

from lineshaft.client.backend import Backend
from lineshaft.errors import InvalidInputError
from lineshaft.saved_token import saved_token
from lineshaft.settings import Settings

if TYPE_CHECKING:
    from lineshaft.checks.registry import Checks


def choose_backend(
    url: str | None,
    token: str | None,
    settings: Settings | None,
    *,
    max_connections: int,
    checks: "Checks | None",
    actor: str | None,
) -> Backend:
    known = settings or Settings.load()
    if url is None and settings is None:
        url = known.url
    if url is not None and url.startswith(("http://", "https://")):
        if checks is not None:
            fault = "can't be used with the URL of a server, which runs the gates of its own settings"
            raise InvalidInputError(errors=[("checks", fault)])
        if actor is not None:
            fault = "can't be used with the URL of a server, which records the name of the token"
            raise InvalidInputError(errors=[("actor", fault)])
        from lineshaft.client.http_backend import HttpBackend  # noqa: PLC0415 - not needed with a database

        return HttpBackend(
            url, token or known.token or saved_token(known.home), max_connections=max_connections
        )
    if token is not None:
        fault = "is for a server: give its URL (http://… or https://…) with it"
        raise InvalidInputError(errors=[("token", fault)])
    if url is not None:
        known = replace(known, database_url=url)
    from lineshaft.client.database_backend import DatabaseBackend  # noqa: PLC0415 - imports psycopg

    return DatabaseBackend(known, max_connections=max_connections, checks=checks, actor=actor)
