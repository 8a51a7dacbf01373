"""What a store can do."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from datetime import timedelta
from typing import Protocol

from lineshaft.errors import SettingsError, UnavailableError
from lineshaft.ids import new_id

#: The name of the object that holds the store's id.
ID_KEY = "lineshaft-store-id"
#: Read, written and hashed at once.
CHUNK_BYTES = 1 << 20
TEMPORARY = "temporary/"
CONTENTS = "sha256/"


def content_key(sha256: str) -> str:
    return f"{CONTENTS}{sha256[:2]}/{sha256[2:]}"


def temporary_key() -> str:
    return TEMPORARY + new_id("upload")


class StoreUnavailableError(UnavailableError):
    """The artifact store is not available."""


class WrongStoreError(StoreUnavailableError, SettingsError):
    """The artifact store of this process is not the one of its database."""


class Store(Protocol):
    """A folder or a bucket. Every method but `describe` may raise StoreUnavailableError."""

    @property
    def has_links(self) -> bool:
        """Whether `link` works."""
        ...

    def describe(self) -> str:
        """Where it is, for messages."""
        ...

    async def read_id(self) -> str | None: ...

    async def create_id(self, store_id: str) -> str:
        """Write the id unless there is one; returns the one that counts."""
        ...

    async def is_empty(self) -> bool:
        """Whether it has no contents."""
        ...

    async def write(self, key: str, chunks: AsyncIterable[bytes]) -> None:
        """Write an object piece by piece. One that was cut off is not visible, or has a temporary key."""
        ...

    async def create(self, key: str, data: bytes) -> None:
        """Write a small object at once, unless it exists."""
        ...

    async def promote(self, key: str, to: str) -> None:
        """Give a temporary object its final key, unless that exists. The temporary one may remain."""
        ...

    async def size(self, key: str) -> int | None:
        """None: it doesn't exist."""
        ...

    def read(self, key: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Bytes from `start` to before `stop`; raises FileNotFoundError if there is no such object."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; they needn't exist."""
        ...

    async def old_temporary(self, age: timedelta) -> list[str]:
        """Temporary keys that are older, up to a thousand."""
        ...

    async def link(self, key: str, lifetime: timedelta) -> str:
        """A signed URL for a download without a token."""
        ...
