"""Helpers for tests of programs that use Lineshaft.

`InlineBench` runs a handler alone, without a database:

    def test_research():
        bench = InlineBench()
        assert bench.run_sync(research, prompt="gears") == Notes("gears")
        assert bench.spent_usd == Decimal("0.02")

`Workbench` is a real queue with a real database for each test, and no waiting:

    async def test_a_mail_is_sent():
        async with Workbench() as bench:
            await sign_up(bench.shaft, "ann@example.org")
            await bench.assert_submitted("mail", spec={"to": "ann@example.org"})
            await bench.drain(agent)

`SyncWorkbench` is the same for tests without an event loop. pytest has fixtures for all three, without any
configuration: `inline_bench`, `async_workbench` and `workbench`. See docs/agents.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineshaft.testing.databases import scratch_database, server_for_tests
    from lineshaft.testing.inline import InlineBench
    from lineshaft.testing.workbench import SyncWorkbench, Workbench

__all__ = ["InlineBench", "SyncWorkbench", "Workbench", "scratch_database", "server_for_tests"]

_MODULES = {
    "InlineBench": "inline",
    "SyncWorkbench": "workbench",
    "Workbench": "workbench",
    "scratch_database": "databases",
    "server_for_tests": "databases",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used first: pytest imports this package in every project."""
    if name not in _MODULES:
        raise AttributeError(f"module 'lineshaft.testing' has no attribute {name!r}")
    return getattr(import_module(f"lineshaft.testing.{_MODULES[name]}"), name)
