"""The table of methods in client.md on the site names every public method of the client, and no other."""

from collections.abc import Iterator

from lineshaft import Artifacts, Lineshaft, Sources, SyncArtifacts, SyncLineshaft, SyncSources
from tests.docs import client_methods
from tests.docs.pages import ROOT


def methods(client: type, artifacts: type, sources: type) -> Iterator[str]:
    """What a program can call; calls of `artifacts` and `sources` have that as their prefix."""
    for prefix, owner in (("", client), ("artifacts.", artifacts), ("sources.", sources)):
        yield from (f"{prefix}{name}" for name in dir(owner) if not name.startswith("_"))


def test_the_table_has_every_method_once() -> None:
    public = set(methods(Lineshaft, Artifacts, Sources)) - {"artifacts", "sources"}

    assert sorted(name for names in client_methods.areas().values() for name in names) == sorted(public)


def test_the_client_without_await_has_the_same_methods() -> None:
    public = set(methods(SyncLineshaft, SyncArtifacts, SyncSources))

    assert {name for names in client_methods.areas().values() for name in names} <= public


def test_the_page_has_a_place_for_the_table() -> None:
    assert (ROOT / "docs" / "client.md").read_text(encoding="utf-8").count(client_methods.MARK) == 1
