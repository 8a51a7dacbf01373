"""An address of every page, and of every action, with the ids of the sample."""

from collections.abc import Callable
from urllib.parse import quote, urlencode

from lineshaft.dashboard.pages import AREAS
from lineshaft.dashboard.visit import ActionFunction, PageFunction, Route
from tests.dashboard.sample import Sample

PAGES: list[Route[PageFunction]] = [page for area in AREAS for page in area.pages]
ACTIONS: list[Route[ActionFunction]] = [action for area in AREAS for action in area.actions]
#: Files, not pages.
FILES = frozenset(
    {
        "/costs/{table}.csv",
        "/tasks/{id}/artifacts/{artifact}",
        "/tasks/{id}/output.json",
        "/tasks/{id}/spec.json",
        "/dags/{id}/picture.svg",
        "/dags/{id}/picture.mmd",
    }
)
#: It leads to another page.
REDIRECTS = frozenset({"/search"})

#: Of pages whose addresses have more than the id that their name says, or several that look different.
_OWN: dict[str, Callable[[Sample], list[str]]] = {
    "/search": lambda sample: ["/search?q=report", f"/search?q={sample.dag}"],
    "/tasks": lambda _: ["/tasks", "/tasks?status=COMPLETED", "/tasks?q=no+such+title"],
    "/tasks/{id}": lambda sample: [
        f"/tasks/{task}"
        for task in (sample.completed, sample.dead, sample.to_approve, sample.running, sample.locked)
    ],
    "/tasks/{id}/artifacts/{artifact}": lambda sample: [
        f"/tasks/{sample.completed}/artifacts/{sample.picture}"
    ],
    "/bulk/{verb}": lambda _: ["/bulk/cancel?status=READY", "/bulk/retry?status=DEAD_LETTERED"],
    "/dead-letters": lambda _: ["/dead-letters", "/dead-letters?tab=decided"],
    "/dead-letters/group": lambda sample: [f"/dead-letters/group?{urlencode({'pattern': sample.pattern})}"],
    "/dead-letters/decide": lambda sample: [
        f"/dead-letters/decide?{urlencode({'pattern': sample.pattern, 'resolution': 'retry'})}"
    ],
    "/approvals/{task_id}": lambda sample: [
        f"/approvals/{sample.to_approve}",
        f"/approvals/{sample.for_person}",
    ],
    "/quotas/edit:{name:path}": lambda sample: ["/quotas/edit:", f"/quotas/edit:{sample.quota}"],
    "/costs/{table}.csv": lambda _: ["/costs/type.csv"],
}


def _names(sample: Sample, path: str) -> dict[str, str]:
    """What stands for the variables of a path."""
    area = path.split("/")[1]
    ids = {"tasks": sample.dead, "dags": sample.dag, "agents": sample.agent}
    return {
        "{id}": ids.get(area, ""),
        "{id:path}": ids.get(area, ""),
        "{task_id}": sample.dead if area == "dead-letters" else sample.to_approve,
        "{name}": sample.quota,
        "{name:path}": sample.quota if area == "quotas" else sample.source,
        "{type:path}": "translate",
        "{key:path}": "contract-17",
        "{verb}": "cancel",
    }


def _filled(path: str, sample: Sample) -> str:
    for variable, value in _names(sample, path).items():
        path = path.replace(variable, quote(value, safe=""))
    assert "{" not in path, f"Add an address of {path} to tests/dashboard/addresses.py"
    return path


def addresses(page: Route[PageFunction], sample: Sample) -> list[str]:
    own = _OWN.get(page.path)
    return own(sample) if own is not None else [_filled(page.path, sample)]


def page_addresses(sample: Sample) -> list[str]:
    """Of all that is shown in a browser."""
    shown = [page for page in PAGES if page.path not in FILES | REDIRECTS]
    return [address for page in shown for address in addresses(page, sample)]


def action_address(action: Route[ActionFunction], sample: Sample) -> str:
    return _filled(action.path, sample)
