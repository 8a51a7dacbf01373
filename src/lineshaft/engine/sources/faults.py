"""Why a source doesn't fire, as far as the database and this process know."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from msgspec import Struct

from lineshaft.engine.sources.file_roots import unwatched
from lineshaft.sources.definition import Definition
from lineshaft.types.sources import NewSource, SourceKind

#: Ticks are fired within seconds, and watchers look at least every ten.
_LATE = timedelta(minutes=1)


class Watcher(Struct, frozen=True):
    name: str
    folders: list[str]
    #: What is wrong with the root of this source.
    fault: str | None
    looked_at: datetime


class SourceState(Struct, frozen=True):
    source: NewSource
    paused: bool
    #: The token that put it was revoked.
    token_revoked: bool
    next_at: datetime | None
    #: The servers that watch for a file source.
    watchers: bytes | None
    #: How many an event source has created within the last minute.
    created_lately: int
    now: datetime


def fault_of(state: SourceState, *, by_server: bool) -> str | None:
    """None: nothing is known to be wrong. `by_server`: the secrets of webhooks are in this environment."""
    source = state.source
    if state.paused:
        why = ", because its token was revoked" if state.token_revoked else ""
        return f"it is paused{why}: 'lineshaft sources resume {source.name}' resumes it"
    if not source.enabled:
        return "its definition has enabled: false"
    if source.kind is SourceKind.WEBHOOK and not by_server:
        return None
    find = _BY_KIND.get(source.kind)
    return None if find is None else find(state)


def _of_schedule(state: SourceState) -> str | None:
    if state.next_at is None or state.now - state.next_at <= _LATE:
        return None
    return (
        f"its tick of {state.next_at:%Y-%m-%d %H:%M:%S} UTC hasn't fired: no server runs the duties "
        "('lineshaft up' without --no-duties)"
    )


def _of_webhook(state: SourceState) -> str | None:
    verify = state.source.verify
    variable = verify.secret_env if isinstance(verify, Struct) else None
    if variable is None or os.environ.get(variable):
        return None
    return f"the server's environment has no {variable}, so all deliveries are refused"


def _of_events(state: SourceState) -> str | None:
    if state.created_lately < Definition(state.source).max_per_minute:
        return None
    return f"it has created {state.created_lately} within a minute (max_per_minute), and goes on after it"


def _of_files(state: SourceState) -> str | None:
    root = str(state.source.root)
    watchers: Sequence[Watcher] = msgspec.json.decode(state.watchers or b"[]", type=list[Watcher])
    watching = [
        each for each in watchers if any(Path(root).is_relative_to(folder) for folder in each.folders)
    ]
    if not watching:
        return unwatched(root)
    for watcher in watching:
        if watcher.fault is not None:
            return f"watcher {watcher.name}: {watcher.fault}"
    last = max(watching, key=lambda each: each.looked_at)
    if state.now - last.looked_at > _LATE:
        return (
            f"no watcher has looked since {last.looked_at:%Y-%m-%d %H:%M:%S} UTC: watcher {last.name} isn't "
            "running ('lineshaft up' is named server, others are 'lineshaft watch')"
        )
    return None


_BY_KIND: Mapping[SourceKind, Callable[[SourceState], str | None]] = {
    SourceKind.SCHEDULE: _of_schedule,
    SourceKind.WEBHOOK: _of_webhook,
    SourceKind.EVENT: _of_events,
    SourceKind.FILES: _of_files,
}
