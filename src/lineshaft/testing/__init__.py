"""Helpers for tests of programs that use Lineshaft: a real database for each test, and no waiting.

    async def test_a_mail_is_sent():
        async with Workbench() as bench:
            await sign_up(bench.shaft, "ann@example.org")
            await bench.assert_submitted("mail", spec={"to": "ann@example.org"})
            await bench.drain(agent)

`SyncWorkbench` is the same for tests without an event loop. `lineshaft.testing.fixtures` has fixtures for
pytest; see docs/agents.md.
"""

from lineshaft.testing.databases import scratch_database, server_for_tests
from lineshaft.testing.workbench import SyncWorkbench, Workbench

__all__ = ["SyncWorkbench", "Workbench", "scratch_database", "server_for_tests"]
