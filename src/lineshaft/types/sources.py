"""Sources: rules that create work when something happens."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from lineshaft.model.open_enum import OpenEnum


class SourceKind(OpenEnum):
    SCHEDULE = "schedule"
    WEBHOOK = "webhook"
    FILES = "files"
    EVENT = "event"
    OBSERVER = "observer"


class FiringOutcome(OpenEnum):
    #: Work was created.
    CREATED = "created"
    #: The key had fired before, or the idempotency key of the work was in use.
    DUPLICATE = "duplicate"
    #: `when` was not true.
    FILTERED = "filtered"
    #: There was too much open work, or ticks were missed.
    SKIPPED = "skipped"
    #: The template could not be rendered, or the work was refused.
    FAILED = "failed"


Overlap = Literal["skip", "cancel_oldest"]
CatchUp = Literal["skip", "one", "all"]


class ShownVerification(Struct, frozen=True, kw_only=True):
    """How deliveries of a webhook are authenticated, as a server shows it, which may be newer."""

    scheme: str
    #: The environment variable of the server that has the secret; it starts with LINESHAFT_HOOK_.
    secret_env: str | None = None
    #: For hmac-sha256 and token: the header with the signature or the token.
    header: str | None = None


class Verification(ShownVerification, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How deliveries of a webhook are authenticated."""

    scheme: Literal["github", "gitlab", "slack", "standard", "hmac-sha256", "token", "none"]


class ShownFields(Struct, frozen=True, kw_only=True):
    """The fields of a source that can be changed, as a server shows them, which may be newer."""

    #: `{"task": {...}}`, `{"dag": {...}}` or `{"goal": "..."}`; strings may contain `${EXPRESSION}`.
    template: dict[str, Any] | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    #: A JMESPath expression: the source fires only if it is true.
    when: str | UnsetType | None = UNSET
    #: A template of the key: what fired under a key doesn't fire again.
    idempotency: str | UnsetType | None = UNSET
    #: The most unfinished tasks or DAGs of this source.
    max_open: int | UnsetType | None = UNSET
    overlap: str | UnsetType = UNSET
    #: When a schedule fires.
    cron: str | UnsetType | None = UNSET
    every_sec: float | UnsetType | None = UNSET
    timezone: str | UnsetType = UNSET
    catch_up: str | UnsetType = UNSET
    jitter_sec: float | UnsetType = UNSET
    #: How a webhook's deliveries are verified.
    verify: ShownVerification | UnsetType = UNSET
    #: For so long, a webhook's delivery with a known body is a repeated one, whatever its id; 0: never.
    replay_window_sec: float | UnsetType = UNSET
    #: What a file source watches.
    root: str | UnsetType = UNSET
    patterns: list[str] | UnsetType = UNSET
    debounce_ms: int | UnsetType = UNSET
    #: What file and event sources fire for.
    on: list[str] | UnsetType = UNSET
    #: Whether `dag.*` events of tasks that were submitted on their own count for an event source, too.
    single: bool | UnsetType = UNSET
    #: How much an event source creates in a minute; later events wait.
    max_per_minute: int | UnsetType = UNSET
    #: What an observer counts, and when it fires.
    window_sec: float | UnsetType = UNSET
    group_by: str | UnsetType = UNSET
    failure_rate: float | UnsetType = UNSET
    min_attempts: int | UnsetType = UNSET
    cooldown_sec: float | UnsetType = UNSET


class SourceFields(ShownFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a source that can be changed. One that is left out takes its default."""

    overlap: Overlap | UnsetType = UNSET
    catch_up: CatchUp | UnsetType = UNSET
    verify: Verification | UnsetType = UNSET


class NewSource(SourceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source to create or replace."""

    name: str
    kind: SourceKind


class Source(ShownFields, frozen=True, kw_only=True):
    name: str
    kind: SourceKind
    #: Where it came from: `api`, `agent` or `file:NAME`.
    origin: str
    #: Grows with each change. A change that names the version it is based on never overwrites a newer one.
    version: int
    created_at: datetime
    updated_at: datetime
    #: The person or token that last changed it by hand; null: unknown, or a file or a program did.
    updated_by: str | None
    #: When a schedule fires next.
    next_at: datetime | None
    last_fired_at: datetime | None
    last_outcome: FiringOutcome | None
    #: Tasks of this source that haven't ended; at most 1000 tasks or DAGs are looked at.
    open_tasks: int
    #: Why it doesn't fire; null: nothing is known to be wrong.
    fault: str | None = None

    @property
    def is_enabled(self) -> bool:
        return self.enabled is True

    def definition(self) -> dict[str, Any]:
        """The fields that a caller may set, without those that are unset."""
        return definition_of(self)


class Firing(Struct, frozen=True, kw_only=True):
    at: datetime
    outcome: FiringOutcome
    task_ids: list[str] = field(default_factory=list)
    dag_id: str | None = None
    error: str | None = None


class Fired(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one event."""

    outcome: FiringOutcome | UnsetType = UNSET
    task_ids: list[str] | UnsetType = UNSET
    dag_id: str | UnsetType | None = UNSET
    error: str | None = None
    #: Only of a dry run: the tasks that would be created.
    tasks: list[dict[str, Any]] | UnsetType = UNSET


class SourceChange(Struct, frozen=True, kw_only=True):
    """What applying a file does, or would do, to one source."""

    name: str
    #: create, change, remove or unchanged.
    change: str
    #: By field of a changed source: the value before and after; null: not set.
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


class SourceChanges(Struct, frozen=True):
    items: list[SourceChange]


def escaped(value: Any) -> Any:
    """A value as a template that renders to it: `${` in its strings isn't an expression."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, dict):
        return {name: escaped(inner) for name, inner in value.items()}
    return [escaped(inner) for inner in value] if isinstance(value, list | tuple) else value


#: Fields of a definition, besides those that can be changed.
_IDENTITY = ("name", "kind")
DEFINED = (*_IDENTITY, *ShownFields.__struct_fields__)


def definition_of(source: ShownFields) -> dict[str, Any]:
    """The given fields of a definition, as JSON values."""
    import msgspec  # noqa: PLC0415 - only its converter

    given = {name: value for name in DEFINED if (value := getattr(source, name, UNSET)) is not UNSET}
    found: dict[str, Any] = msgspec.to_builtins(given)
    return found
