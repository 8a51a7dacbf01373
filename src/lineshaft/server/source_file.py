"""The file of sources (LINESHAFT_SOURCES), applied when a server starts."""

from pathlib import Path

import structlog

from lineshaft.engine.feed.actor import acting_as
from lineshaft.engine.sources.registry import SourceRegistry
from lineshaft.errors import InvalidInputError, SettingsError
from lineshaft.sources import file

_log = structlog.get_logger("lineshaft.sources")


async def apply_file(sources: SourceRegistry, path: Path) -> None:
    """Apply the file and log every difference; raises SettingsError if it isn't valid."""
    try:
        with acting_as("settings"):
            changes = await sources.apply(file.read(path), origin=file.origin_of(path), check_roots=False)
    except InvalidInputError as error:
        raise SettingsError(f"LINESHAFT_SOURCES ({path}): {error}") from None
    for change in changes:
        if change.change != "unchanged":
            fields = sorted(change.fields)
            _log.info("Source of the file applied", source=change.name, change=change.change, fields=fields)
