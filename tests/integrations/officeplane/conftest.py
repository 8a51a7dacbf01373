"""The same server as for the native API."""

from tests.server.conftest import client, serve, served

__all__ = ["client", "serve", "served"]
