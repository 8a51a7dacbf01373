"""The HTTP API as clients of a chaos run call it: one request a connection, of whichever server."""

import asyncio
import json
import os
import random
import urllib.error
import urllib.request
from typing import Any

import msgspec

#: What has not been answered by then is taken for lost, here and on connections to the database.
ANSWER_SEC = 10
_SERVER_ERROR = 500


class AwayError(Exception):
    """There was no response, or the response was that the database is away."""


async def call(urls: list[str], method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer."""
    data = None if body is None else msgspec.json.encode(body)
    return await asyncio.to_thread(_fetch, method, random.choice(urls) + path, data)


def _fetch(method: str, url: str, body: bytes | None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("LINESHAFT_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310 - our own servers
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SEC) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            found = json.loads(error.read() or b"{}")
        if error.code >= _SERVER_ERROR:
            raise AwayError(f"{error.code}: {found.get('code')}: {found.get('detail')}") from error
        return error.code, found
    except (OSError, ValueError) as error:
        raise AwayError(str(error)) from error
