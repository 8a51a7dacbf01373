"""Definitions of sources: checked, with the defaults of their kind filled in, and compiled."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import shown
from lineshaft.model.storable import is_storable, json_fault
from lineshaft.settings import HOOK_PREFIX
from lineshaft.sources import ticks
from lineshaft.sources.expressions import Budget, Expression, ExpressionError
from lineshaft.sources.template import MAX_BYTES, Template, TemplateError
from lineshaft.sources.ticks import TickError, Ticks
from lineshaft.sources.work import RenderedWork, WorkTemplate
from lineshaft.types.sources import DEFINED, NewSource, SourceKind, definition_of

MAX_NAME = 200
MAX_KEY = 1_000
MAX_OPEN = 10_000
#: The limits of event sources.
DEFAULT_MAX_OPEN, DEFAULT_PER_MINUTE = 1_000, 1_000
MAX_PER_MINUTE = 10_000
MAX_REPLAY_WINDOW_SEC = 30 * 86_400.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: Parts of the paths of the API.
_RESERVED = frozenset({"fire", "firings"})
#: The page of the dashboard that creates a source.
_NEW = "new"
AGENT_PREFIX = "agent:"
_VARIABLE = re.compile(HOOK_PREFIX + r"[A-Za-z0-9_]{1,80}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
_EVENT_KIND = re.compile(r"[a-z]+(\.[a-z_]+)?")

_Faults = list[tuple[str, str]]
_COMMON: Mapping[str, Any] = {
    "enabled": True,
    "when": None,
    "idempotency": None,
    "max_open": None,
    "overlap": "skip",
}
#: The fields of each kind with their defaults; UNSET: required.
_FIELDS: Mapping[SourceKind, Mapping[str, Any]] = {
    SourceKind.SCHEDULE: {
        "cron": None,
        "every_sec": None,
        "timezone": "UTC",
        "catch_up": "one",
        "jitter_sec": 0.0,
    },
    SourceKind.WEBHOOK: {"verify": UNSET, "replay_window_sec": 0.0},
    SourceKind.FILES: {
        "root": UNSET,
        "patterns": UNSET,
        "on": ["added", "modified"],
        "debounce_ms": 500,
    },
    # Without these limits, one event could lead to a thousand, and each of them to a thousand more.
    SourceKind.EVENT: {
        "on": UNSET,
        "single": False,
        "max_open": DEFAULT_MAX_OPEN,
        "max_per_minute": DEFAULT_PER_MINUTE,
    },
    SourceKind.OBSERVER: {
        "window_sec": 86_400.0,
        "group_by": "type",
        "failure_rate": 0.4,
        "min_attempts": 10,
        "cooldown_sec": 86_400.0,
    },
}
_CREATOR = {
    SourceKind.SCHEDULE: "cron",
    SourceKind.WEBHOOK: "event",
    SourceKind.FILES: "event",
    SourceKind.EVENT: "event",
    SourceKind.OBSERVER: "system",
}


def agent_of(name: str) -> str | None:
    """The agent that a source named `agent:ID/NAME` belongs to."""
    if not name.startswith(AGENT_PREFIX):
        return None
    return name.removeprefix(AGENT_PREFIX).rpartition("/")[0] or None


def checked(source: NewSource) -> NewSource:
    """The definition with defaults; raises InvalidInputError with all faults that were found."""
    if not source.kind.is_known:
        raise InvalidInputError(
            errors=[("kind", f"must be one of {', '.join(SourceKind)}, got {shown(source.kind)}")]
        )
    faults: _Faults = []
    _check_name(source, faults)
    filled = _filled(source, faults)
    _check_common(filled, faults)
    if not faults:
        _CHECKS[source.kind](filled, faults)
    if faults:
        raise InvalidInputError(errors=faults)
    return msgspec.convert({**filled, "name": source.name, "kind": source.kind}, NewSource)


def _check_name(source: NewSource, faults: _Faults) -> None:
    name = source.name
    own = name.rpartition("/")[2] if agent_of(name) else name
    if own in _RESERVED or name == _NEW:
        faults.append(("name", f"{shown(name)} is part of an address; choose another name"))
    elif len(name) > MAX_NAME or not is_storable(name) or not _NAME.fullmatch(own):
        form = "1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit, or agent:ID/NAME"
        faults.append(("name", f"must be {form}, got {shown(name)}"))
    elif agent_of(name) and source.kind is not SourceKind.SCHEDULE:
        faults.append(("name", "agent:ID/NAME is for schedules that an agent declares"))


def _filled(source: NewSource, faults: _Faults) -> dict[str, Any]:
    known = {**_COMMON, "template": UNSET, **_FIELDS[source.kind]}
    given = definition_of(source)
    filled: dict[str, Any] = {}
    for name, default in known.items():
        if given.get(name) is not None:
            filled[name] = given[name]
        elif default is UNSET:
            faults.append((name, f"is required for sources of kind {source.kind}"))
        else:
            filled[name] = default
    for name in given:
        if name not in known and name not in {"name", "kind"}:
            faults.append((name, f"is not a field of sources of kind {source.kind}"))
    return filled


def _check_common(filled: dict[str, Any], faults: _Faults) -> None:
    most = filled.get("max_open")
    if most is not None and not 1 <= most <= MAX_OPEN:
        faults.append(("max_open", f"must be a whole number from 1 to {MAX_OPEN}, got {most}"))
    if "template" not in filled:
        return
    try:
        encoded = msgspec.json.encode(filled)
    except (ValueError, TypeError) as error:
        faults.append(("template", f"must be JSON: {error}"))
        return
    if len(encoded) > MAX_BYTES:
        faults.append(("", f"the definition is larger than {MAX_BYTES} bytes"))
        return
    if json_fault(encoded) is not None:
        faults.append(("", "the definition has characters that PostgreSQL can't hold"))
        return
    for name in _COMPILED:
        if filled.get(name) is not None:
            faults += _faults_of(name, filled[name])


def _faults_of(name: str, value: Any) -> _Faults:
    """The faults of a template or expression."""
    try:
        _COMPILED[name](value)
    except TemplateError as error:
        return [(error.place, error.fault)]
    except ExpressionError as error:
        return [(name, str(error))]
    except InvalidInputError as error:
        return list(error.errors)
    return []


_COMPILED: Mapping[str, Callable[[Any], Any]] = {
    "template": WorkTemplate,
    "when": Expression,
    "idempotency": lambda text: Template(text, "idempotency"),
}


def _check_schedule(filled: dict[str, Any], faults: _Faults) -> None:
    every = filled["every_sec"]
    if (filled["cron"] is None) == (every is None):
        faults.append(("cron", "give either cron or every_sec"))
        return
    if every is not None and not ticks.MIN_EVERY_SEC <= every <= ticks.MAX_EVERY_SEC:
        fault = f"must be from {ticks.MIN_EVERY_SEC:.0f} to {ticks.MAX_EVERY_SEC:.0f} seconds, got {every}"
        faults.append(("every_sec", fault))
    if not 0 <= filled["jitter_sec"] <= ticks.MAX_JITTER_SEC:
        fault = f"must be from 0 to {ticks.MAX_JITTER_SEC:g} seconds, got {filled['jitter_sec']}"
        faults.append(("jitter_sec", fault))
    try:
        ticks.zone(filled["timezone"])
        if filled["cron"] is not None:
            ticks.Cron(filled["cron"], filled["timezone"])
    except TickError as error:
        faults.append((error.field, error.fault))


def _check_webhook(filled: dict[str, Any], faults: _Faults) -> None:
    verify = filled["verify"]
    scheme, variable, header = verify["scheme"], verify["secret_env"], verify["header"]
    if scheme == "none":
        if variable is not None:
            faults.append(("verify.secret_env", "has no use with the scheme none"))
    elif variable is None:
        faults.append(("verify.secret_env", f"is required for the scheme {scheme}"))
    elif not _VARIABLE.fullmatch(variable):
        # Else a source could read any variable of the server, such as the password of its database.
        fault = f"must be the name of an environment variable that starts with {HOOK_PREFIX}"
        faults.append(("verify.secret_env", f"{fault}, got {shown(variable)}"))
    if header is not None:
        if scheme not in {"hmac-sha256", "token"}:
            faults.append(("verify.header", f"has no use with the scheme {scheme}, whose headers are fixed"))
        elif not _HEADER.fullmatch(header):
            faults.append(("verify.header", f"must be the name of a header, got {shown(header)}"))
    if not 0 <= filled["replay_window_sec"] <= MAX_REPLAY_WINDOW_SEC:
        fault = f"must be from 0 to {MAX_REPLAY_WINDOW_SEC:.0f} seconds, got {filled['replay_window_sec']}"
        faults.append(("replay_window_sec", fault))


def _check_files(filled: dict[str, Any], faults: _Faults) -> None:
    if not PurePath(filled["root"]).is_absolute():
        faults.append(("root", f"must be an absolute path, got {shown(filled['root'])}"))
    if not filled["patterns"] or len(filled["patterns"]) > 100:  # noqa: PLR2004
        faults.append(("patterns", "must have 1 to 100 patterns"))
    _check_one_of(filled["on"], {"added", "modified", "deleted"}, faults)
    if not 0 <= filled["debounce_ms"] <= 3_600_000:  # noqa: PLR2004 - an hour
        faults.append(("debounce_ms", f"must be from 0 to 3600000, got {filled['debounce_ms']}"))


def _check_one_of(given: list[str], allowed: set[str], faults: _Faults) -> None:
    for number, name in enumerate(given):
        if name not in allowed:
            faults.append(
                (f"on[{number}]", f"must be one of {', '.join(sorted(allowed))}, got {shown(name)}")
            )
    if not given:
        faults.append(("on", "must have at least one entry"))


def _check_event(filled: dict[str, Any], faults: _Faults) -> None:
    for number, kind in enumerate(filled["on"]):
        if not _EVENT_KIND.fullmatch(kind):
            faults.append(
                (f"on[{number}]", f"must be a kind of event such as dag.completed, got {shown(kind)}")
            )
    if not 1 <= len(filled["on"]) <= 50:  # noqa: PLR2004
        faults.append(("on", "must have 1 to 50 kinds of events"))
    if not 1 <= filled["max_per_minute"] <= MAX_PER_MINUTE:
        fault = f"must be a whole number from 1 to {MAX_PER_MINUTE}, got {filled['max_per_minute']}"
        faults.append(("max_per_minute", fault))


def _check_observer(filled: dict[str, Any], faults: _Faults) -> None:
    group = filled["group_by"]
    if group not in {"type", "model", "agent"} and not (
        group.startswith("tag:") and len(group) > len("tag:")
    ):
        faults.append(("group_by", f"must be type, model, agent or tag:PREFIX, got {shown(group)}"))
    if not 0 < filled["failure_rate"] <= 1:
        faults.append(("failure_rate", f"must be above 0 and at most 1, got {filled['failure_rate']}"))
    if not 1 <= filled["min_attempts"] <= 1_000_000:  # noqa: PLR2004
        faults.append(("min_attempts", f"must be from 1 to 1000000, got {filled['min_attempts']}"))
    for name in ("window_sec", "cooldown_sec"):
        if not 60 <= filled[name] <= ticks.MAX_EVERY_SEC:  # noqa: PLR2004
            fault = f"must be from 60 to {ticks.MAX_EVERY_SEC:.0f} seconds, got {filled[name]}"
            faults.append((name, fault))


_CHECKS: Mapping[SourceKind, Callable[[dict[str, Any], _Faults], None]] = {
    SourceKind.SCHEDULE: _check_schedule,
    SourceKind.WEBHOOK: _check_webhook,
    SourceKind.FILES: _check_files,
    SourceKind.EVENT: _check_event,
    SourceKind.OBSERVER: _check_observer,
}


class Rendered(Struct, frozen=True):
    #: None: `when` is not true.
    work: RenderedWork | None
    #: From `idempotency`; None: the default of the kind.
    key: str | None = None


class Definition:
    """A checked definition."""

    def __init__(self, source: NewSource) -> None:
        self.source = source

    # Compiled when they are used: a large definition takes its time.

    @cached_property
    def _work(self) -> WorkTemplate:
        return WorkTemplate(self.source.template or {})

    @cached_property
    def _when(self) -> Expression | None:
        return Expression(self.source.when) if self.source.when else None

    @cached_property
    def _key(self) -> Template | None:
        return Template(self.source.idempotency, "idempotency") if self.source.idempotency else None

    @property
    def max_open(self) -> int | None:
        """How much of its work may be open. Sources of older versions may lack the default."""
        default = DEFAULT_MAX_OPEN if self.source.kind is SourceKind.EVENT else None
        return self.source.max_open or default

    @property
    def max_per_minute(self) -> int:
        """How much an event source creates in a minute."""
        return self.source.max_per_minute or DEFAULT_PER_MINUTE

    def created_by(self, event_kind: str | None = None) -> str:
        """The label of the work. `event_kind` is the kind of the event that an event source saw."""
        prefix = _CREATOR[self.source.kind]
        if event_kind is not None and event_kind.startswith("dag."):
            prefix = "dag"
        return f"{prefix}:{self.source.name}"

    def render(self, event: Mapping[str, Any], now: datetime, *, event_kind: str | None = None) -> Rendered:
        """The work for an event; raises InvalidInputError, naming the field at fault."""
        data = {
            "event": event,
            "source": {"name": self.source.name, "kind": self.source.kind.value},
            "now": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        budget = Budget()
        try:
            if self._when is not None and not _is_true(self._when.evaluate(data, budget)):
                return Rendered(None)
            key = None if self._key is None else self._key.render(data, budget)
            return Rendered(self._work.render(data, self.created_by(event_kind), budget), _checked_key(key))
        except TemplateError as error:
            raise InvalidInputError(errors=[(error.place, error.fault)]) from None
        except ExpressionError as error:
            raise InvalidInputError(errors=[("when", str(error))]) from None

    def ticks(self, created_at: datetime) -> Ticks:
        source = self.source
        if isinstance(source.every_sec, float | int):
            return ticks.Every(source.every_sec, created_at)
        return ticks.Cron(source.cron or "", source.timezone or "UTC")

    def upcoming(self, created_at: datetime, now: datetime) -> Iterator[datetime]:
        """When a schedule fires after now; other sources have no times."""
        if self.source.kind is SourceKind.SCHEDULE:
            for tick in self.ticks(created_at).onwards(now):
                yield self.due_at(tick)

    def due_at(self, tick: datetime) -> datetime:
        """When a tick fires: with its jitter."""
        return tick + ticks.jitter(self.source.name, tick, self.source.jitter_sec or 0.0)


def _is_true(value: Any) -> bool:
    """As JMESPath has it: everything but false, null and what is empty."""
    return value not in (None, False, "", [], {}) or (value == 0 and value is not False)


def _checked_key(key: Any) -> str | None:
    if key is None:
        return None
    text = key if isinstance(key, str) else msgspec.json.encode(key).decode()
    if not text or len(text) > MAX_KEY or not is_storable(text):
        raise InvalidInputError(
            errors=[("idempotency", f"must be a text of 1 to {MAX_KEY} characters when it is rendered")]
        )
    return text


@lru_cache(maxsize=1_024)
def compiled(stored: bytes) -> Definition:
    """The compiled form of a stored definition, which was checked when it was stored.

    A newer version stores all its fields with their defaults. Those that this version doesn't know are
    passed over.
    """
    fields = {name: value for name, value in msgspec.json.decode(stored).items() if name in DEFINED}
    return Definition(msgspec.convert(fields, NewSource))
