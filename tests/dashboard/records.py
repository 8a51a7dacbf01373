"""What pages leave in the database, and names that try to break a page."""

import html
import re
from typing import Any
from urllib.parse import quote

import psycopg

from tests.dashboard.conftest import Served
from tests.dashboard.forms import NAME, Person

#: A name that would run a script, reorder the line, end an attribute or leave its folder.
HOSTILE = "x/../<script>alert(1)</script>\"'>\nsecond ?a=b#c%2e&amp; \u202eRTL\x1b[31m"


def events(connection: psycopg.Connection, kind: str) -> list[dict[str, Any]]:
    """The data of all events of a kind, the oldest first."""
    found = connection.execute(
        "SELECT data FROM lineshaft.event WHERE %s = ANY (kinds) ORDER BY seq", [kind]
    ).fetchall()
    return [data for (data,) in found]


def check_act(connection: psycopg.Connection, kind: str, reason: str | None, **data: Any) -> None:
    """The newest event of a kind has the person, the reason and this data."""
    newest = events(connection, kind)[-1]
    expected = {"actor": NAME, **({"reason": reason} if reason else {}), **data}
    assert {name: newest.get(name) for name in expected} == expected


def check_harmless(page: str) -> None:
    """Nothing of a hostile name is part of the document, or a control character for a terminal."""
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def addresses(page: str, start: str) -> list[str]:
    """Of links and forms that begin so, as a browser would request them."""
    found = re.findall(r'(?:href|action|formaction)="([^"]*)"', page)
    return list(dict.fromkeys(html.unescape(each) for each in found if html.unescape(each).startswith(start)))


async def live_part(served: Served, person: Person, page: str) -> str:
    """The first message of the stream that an open page reads."""
    found = re.search(r'data-url="([^"]*)"', page)
    assert found is not None
    cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in person.cookies.items())}
    url = quote(html.unescape(found[1]), safe="")
    reader, writer = await served.client.send("GET", f"/live?page={url}", headers=cookies)
    try:
        await reader.readuntil(b"event: ")
        return (await reader.readuntil(b"\n\n")).decode()
    finally:
        writer.close()


async def reader_of(served: Served) -> Person:
    """A person whose token only reads."""
    made = await served.service.tokens.create("auditor", "read")
    served.service.notice_token()
    person = Person(served)
    await person.log_in(made.token)
    return person
