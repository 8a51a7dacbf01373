"""A real Valkey, and servers that share document locks through it."""

from collections.abc import Iterator

import pytest

from lineshaft.integrations.officeplane_redis import locks
from tests.server.conftest import client, serve, served
from tests.valkey import Valkey, valkey_server

__all__ = ["client", "serve", "served"]


@pytest.fixture
def valkey(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valkey]:
    monkeypatch.setattr(locks, "LOOK_EVERY_SEC", 0.02)
    with valkey_server() as running:
        yield running
