"""Contents are compared with their digest while they are read."""

import hashlib
from collections.abc import AsyncIterator

from lineshaft.errors import LineshaftError


async def verified(
    chunks: AsyncIterator[bytes], sha256: str, size: int, start: int, stop: int
) -> AsyncIterator[bytes]:
    """The bytes from `start` to `stop`. If those are all, the last ones come only if the digest is right."""
    whole = start == 0 and stop == size
    digest, seen, last = hashlib.sha256(), 0, b""
    async for chunk in chunks:
        seen += len(chunk)
        if not whole:
            yield chunk
            continue
        digest.update(chunk)
        if last:
            yield last
        last = chunk
    if seen != stop - start or (whole and digest.hexdigest() != sha256):
        raise LineshaftError(
            f"The content {sha256} in the artifact store is not what was uploaded: its size or SHA-256 "
            "differs. Restore the object from a backup."
        )
    if last:
        yield last
