"""For `lineshaft doctor`: whether Redis answers, takes writes and is a single server."""

import secrets
import time
from typing import Any

from lineshaft.integrations.redis.connection import RedisServer


def check(url: str) -> tuple[str, str]:
    """Its place, and what is known about it; raises RedisUnavailableError."""
    server = RedisServer(url)
    with server.connect_blocking("lineshaft-doctor", max_connections=1) as client, server.reporting():
        client.ping()
        began = time.perf_counter()
        client.set(f"lineshaft:doctor:{secrets.token_hex(8)}", "", px=1_000)
        took_ms = (time.perf_counter() - began) * 1_000
        about: Any = client.info("server")
    kind = "Valkey" if "valkey_version" in about else "Redis"
    version = about.get("valkey_version") or about.get("redis_version", "")
    return server.place, f"{kind} {version}, a write takes {took_ms:.1f} ms"
