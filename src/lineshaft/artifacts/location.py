"""The store that the settings name."""

from pathlib import Path

from lineshaft.artifacts.folder import FolderStore
from lineshaft.artifacts.store import Store
from lineshaft.settings import Settings

_S3 = "s3://"


def open_store(settings: Settings) -> Store:
    """A folder, or a bucket (`s3://BUCKET/PREFIX`). Nothing is created or read yet."""
    place = settings.artifacts
    if place is None:
        return FolderStore(settings.home / "artifacts")
    if place.startswith(_S3):
        from lineshaft.artifacts.s3 import S3Store  # noqa: PLC0415 - an extra

        bucket, _, prefix = place.removeprefix(_S3).partition("/")
        return S3Store(bucket, prefix.strip("/"))
    return FolderStore(Path(place).expanduser().absolute())
