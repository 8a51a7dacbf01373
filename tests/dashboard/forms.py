"""A visitor without a browser: cookies, forms and redirects, over a real socket."""

import html
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from tests.dashboard.conftest import Served
from tests.server.client import Reply, read_reply

_CSRF = re.compile(r'name="csrf" value="([^"]+)"')
_REDIRECTS = frozenset({302, 303, 307})
NAME = "Test Person"

Fields = Mapping[str, str | Sequence[str]]


class Person:
    """Keeps cookies, and the CSRF token of the last page that had a form."""

    def __init__(self, served: Served) -> None:
        self._client = served.client
        self.cookies: dict[str, str] = {}
        self.csrf = ""
        #: Where the last redirect led.
        self.path = ""

    async def get(self, path: str) -> Reply:
        """A page as it is, without following a redirect."""
        return await self._send("GET", path)

    async def page(self, path: str, status: int = 200) -> str:
        """The text of a page, after redirects."""
        reply = await self.follow(await self.get(path))
        assert reply.status == status, (path, reply.status, reply.body[:2000])
        return reply.body.decode()

    async def log_in(self, token: str) -> None:
        await self.page("/login")
        reply = await self.submit("/login", {"token": token})
        assert reply.status in _REDIRECTS, reply
        await self.page("/")

    async def submit(self, path: str, fields: Fields | None = None, *, csrf: str | None = None) -> Reply:
        """Send a form; the answer as it is. Without a session, it is sent with a name."""
        given = {"csrf": self.csrf if csrf is None else csrf, "your_name": NAME, **(fields or {})}
        return await self._send("POST", path, urlencode(given, doseq=True).encode())

    async def act(self, path: str, fields: Fields | None = None) -> str:
        """Send a form that must succeed; the text of the page where it leads."""
        reply = await self.submit(path, fields)
        assert reply.status in _REDIRECTS, (path, reply.status, reply.body[:2000])
        found = await self.follow(reply)
        assert found.status == 200, found.body[:2000]
        return found.body.decode()

    async def follow(self, reply: Reply) -> Reply:
        for _ in range(5):
            if reply.status not in _REDIRECTS:
                return reply
            self.path = reply.headers["location"]
            reply = await self.get(self.path)
        raise AssertionError("too many redirects")

    async def _send(self, method: str, path: str, body: bytes | None = None) -> Reply:
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        reader, writer = await self._client.send(method, path, raw=body, headers=headers)
        try:
            reply = await read_reply(_CookieReader(reader, self.cookies))  # type: ignore[arg-type]  # as much of it as is used
        finally:
            writer.close()
        if found := _CSRF.search(reply.body.decode(errors="replace")):
            self.csrf = html.unescape(found[1])
        return reply


class _CookieReader:
    """Takes cookies out of an answer: a reply keeps only the last of several headers with one name."""

    def __init__(self, reader: object, cookies: dict[str, str]) -> None:
        self._reader = reader
        self._cookies = cookies

    async def readuntil(self, end: bytes) -> bytes:
        head: bytes = await self._reader.readuntil(end)  # type: ignore[attr-defined]
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(": ")
            if name.lower() == "set-cookie":
                key, _, content = value.partition(";")[0].partition("=")
                if "max-age=0" in value.lower():
                    self._cookies.pop(key, None)
                else:
                    self._cookies[key] = content
        return head

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)


def text_of(page: str) -> str:
    """What a reader sees: without tags, on one line."""
    body = re.sub(r"(?s)<(script|svg|dialog)\b.*?</\1>", " ", page.partition("<main")[2])
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())
