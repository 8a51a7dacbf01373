"""What a page gets and gives: a visit, a view, and the registry of pages and actions."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from msgspec import Struct, field
from msgspec.structs import replace
from starlette.responses import Response

from lineshaft.dashboard.shared_reads import SharedReads
from lineshaft.engine.caller import Caller
from lineshaft.engine.engine import Engine
from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.server.service import Service
from lineshaft.types import Scope

#: Every event concerns it.
EVERYTHING = "*"


class Values:
    """Fields of a query or a form, which may be repeated. Text is without spaces at its ends."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = [(name, value.strip()) for name, value in pairs]

    def get(self, name: str, default: str = "") -> str:
        """The last value that isn't empty."""
        return next((value for known, value in reversed(self._pairs) if known == name and value), default)

    def all(self, name: str) -> list[str]:
        """All values that aren't empty, each once."""
        return list(dict.fromkeys(value for known, value in self._pairs if known == name and value))

    def number(self, name: str) -> float | None:
        """None: empty. Raises InvalidInputError if it isn't a number."""
        text = self.get(name)
        if not text:
            return None
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise InvalidInputError(errors=[(name, f"must be a number, got {text[:100]!r}")])
        return found

    def pairs(self) -> list[tuple[str, str]]:
        return list(self._pairs)

    def with_(self, **changes: object) -> str:
        """As a query with these fields replaced; None removes one."""
        kept = [(name, value) for name, value in self._pairs if name not in changes and value]
        kept += [(name, str(value)) for name, value in changes.items() if value is not None]
        return urlencode(kept)


class Visit(Struct, frozen=True):
    """One request for a page or an action."""

    service: Service
    caller: Caller
    #: Path with its query, as in the address bar.
    url: str
    path: Mapping[str, str]
    query: Values
    shared: SharedReads
    #: The page is open and rendered again: what was read a moment ago will do.
    is_open: bool = False
    #: Only of actions.
    form: Values = field(default_factory=Values)
    #: Who acts; None: not asked yet, so that only pages are shown.
    name: str | None = None

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def actor(self) -> str:
        return self.name or self.caller.name

    def may(self, scope: str) -> bool:
        return self.caller.may(Scope(scope))


class View(Struct, frozen=True):
    """A page: a template and what it shows. Its block `live` is what changes while it is open."""

    template: str
    title: str
    context: Mapping[str, Any] = field(default_factory=dict)
    #: It is rendered again after events of these: `task:ID`, `dag:ID`, `agent:ID`, a kind such as
    #: `source.changed`, or EVERYTHING. Empty: not on events.
    topics: frozenset[str] = frozenset()
    #: At most so often.
    at_most_every_sec: float = 0.25
    #: Also without any event, because something on it changes with time; None: never.
    refresh_sec: float | None = None
    status: int = 200

    def with_context(self, **more: Any) -> "View":
        return replace(self, context={**self.context, **more})

    def refused(self, error: Exception) -> "View":
        """The same page with what was wrong with the form."""
        return replace(self.with_context(error=error).still(), status=422)

    def still(self) -> "View":
        """As the answer to an action: not live, because the address is that of the action, not of a page."""
        return replace(self, topics=frozenset(), refresh_sec=None)


class Done(Struct, frozen=True):
    """The result of an action: go to a page, which shows the message."""

    to: str
    message: str


PageFunction = Callable[[Visit], Awaitable[View | Response]]
ActionFunction = Callable[[Visit], Awaitable[Done | View | Response]]
Function = TypeVar("Function")


def _always(_form: Values) -> bool:
    return True


def _never(_form: Values) -> bool:
    return False


def _refusable(action: ActionFunction, page: PageFunction) -> ActionFunction:
    @wraps(action)
    async def act(visit: Visit) -> Done | View | Response:
        try:
            return await action(visit)
        except LineshaftError as error:
            view = await page(visit)
            return view.refused(error) if isinstance(view, View) else view

    return act


class Route(Struct, Generic[Function], frozen=True):
    path: str
    scope: Scope
    function: Function
    #: Whether this form changes something: what only looks is not recorded, and needs no name.
    changes: Callable[[Values], bool] = _never


class Pages:
    """The pages and actions of one area, in the order in which addresses are matched."""

    def __init__(self) -> None:
        self.pages: list[Route[PageFunction]] = []
        self.actions: list[Route[ActionFunction]] = []

    def page(self, path: str, scope: Scope = Scope.READ) -> Callable[[PageFunction], PageFunction]:
        def register(function: PageFunction) -> PageFunction:
            self.pages.append(Route(path, scope, function))
            return function

        return register

    def action(
        self,
        path: str,
        scope: Scope = Scope.OPERATE,
        *,
        changes: Callable[[Values], bool] | bool = True,
        refused: PageFunction | None = None,
    ) -> Callable[[ActionFunction], ActionFunction]:
        """A POST. The form's CSRF token and the caller's scope and name are checked before it is called.

        `changes`: whether a form changes something. One that only looks at what was entered needs no name.
        `refused`: the page that shows why, if the action raises an error of ours.
        """
        asked = changes if callable(changes) else _always if changes else _never

        def register(function: ActionFunction) -> ActionFunction:
            act = function if refused is None else _refusable(function, refused)
            self.actions.append(Route(path, scope, act, asked))
            return function

        return register
