"""The address of a database, checked before the driver's errors can quote a password from it."""

from collections.abc import Mapping

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lineshaft.errors import SettingsError


def checked_dsn(dsn: str) -> dict[str, object]:
    """The parts of a DSN; raises SettingsError if it is malformed."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        parts = None
    # An unescaped @ or / in a password moves the rest of it to the host or the port, and so into errors.
    if parts is None or "@" in _text(parts, "host") or _text(parts, "port").strip("0123456789,"):
        raise SettingsError(
            "LINESHAFT_DATABASE_URL is not valid: it must be postgresql://USER@HOST:PORT/DATABASE, or "
            "PostgreSQL keywords such as host=… dbname=…. In a URL, write special characters of the password "
            "as %XX: @ as %40, / as %2F, : as %3A, # as %23, % as %25."
        )
    return dict(parts)


def dsn_from(parameters: Mapping[str, object]) -> str:
    """A DSN with those of a driver's parameters that libpq knows; the rest concerns the driver."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    return make_conninfo("", **{name: str(value) for name, value in parameters.items() if name in known})


def _text(parts: Mapping[str, object], name: str) -> str:
    return str(parts.get(name) or "")
