"""One HTTP request, for webhooks.

Not by a client library: those log addresses, which hold secrets, and follow redirects, which would carry what
is signed to somewhere else.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import h11

from lineshaft.integrations.notify import DeliveryError

_CHUNK = 65_536


async def post(url: str, headers: Mapping[str, str], body: bytes, *, timeout_sec: float) -> int:
    """Gives the status of the answer."""
    try:
        async with asyncio.timeout(timeout_sec):
            return await _post(url, headers, body)
    except TimeoutError:
        raise DeliveryError(f"no answer within {timeout_sec:g} s") from None
    except ssl.SSLError as error:
        raise DeliveryError(f"no secure connection: {error.reason or type(error).__name__}") from None
    except OSError as error:
        raise DeliveryError(f"no connection: {_words(error)}") from None
    except h11.ProtocolError:
        raise DeliveryError("the answer is not HTTP") from None


def _words(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or type(error).__name__
    return os.strerror(error.errno)  # asyncio's own text has the address


async def _post(url: str, headers: Mapping[str, str], body: bytes) -> int:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    try:
        connection = h11.Connection(h11.CLIENT)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        own = {"host": parts.netloc, "content-length": str(len(body)), "connection": "close"}
        request = h11.Request(method="POST", target=target, headers=list((own | dict(headers)).items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        while True:
            answer = connection.next_event()
            if isinstance(answer, h11.Response):
                return answer.status_code
            if answer is h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK))
            elif isinstance(answer, h11.ConnectionClosed):
                raise DeliveryError("the connection was closed without an answer")
    finally:
        writer.transport.abort()
