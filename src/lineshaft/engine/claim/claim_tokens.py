"""Claim tokens: they authenticate the holder of a claim, where clients and servers don't share a database.

A token is the epoch and the time of the claim, and an HMAC-SHA256 over them and the task's id with a key of
the installation. So it can't be derived from what other callers can read. Every server makes the same one: an
agent can continue at another server, or after a restart, and nothing is stored for a claim. The epoch fences,
as in any claim.
"""

import base64
import hmac
import secrets
import struct
from datetime import UTC, datetime, timedelta

from lineshaft.engine.postgres import catalog
from lineshaft.engine.postgres.database import Connection, Database
from lineshaft.engine.postgres.rows import fetch_value
from lineshaft.types.work import ClaimedTask, ClaimRef

_SQL = catalog.load(__name__)
_KEY_BYTES = 32
#: Epoch, and the time of the claim in microseconds.
_CLAIM = struct.Struct(">IQ")
_DIGEST_BYTES = 32
#: No other use of the key produces the same digests.
_PURPOSE = b"lineshaft claim\0"
_START = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class ClaimTokens:
    """Makes and verifies tokens."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, task: ClaimedTask) -> str:
        """The token of this claim."""
        return self._token(task.id, _CLAIM.pack(task.epoch, (task.claimed_at - _START) // _MICROSECOND))

    def find(self, task_id: str, token: str) -> ClaimRef | None:
        """The claim with this token; None: it is not a token of this task."""
        try:
            given = token.encode("ascii")
            packed = base64.b64decode(given + b"=" * (-len(given) % 4), altchars=b"-_", validate=True)
        except ValueError:
            return None
        if len(packed) != _CLAIM.size + _DIGEST_BYTES:
            return None
        claim = packed[: _CLAIM.size]
        if not hmac.compare_digest(self._token(task_id, claim).encode(), given):
            return None
        epoch, _ = _CLAIM.unpack(claim)
        return ClaimRef(task_id, epoch, token)

    def _token(self, task_id: str, claim: bytes) -> str:
        # The claim has a fixed length, so that no two pairs of a claim and a task are the same text.
        digest = hmac.digest(self._key, _PURPOSE + claim + task_id.encode(errors="surrogatepass"), "sha256")
        return base64.urlsafe_b64encode(claim + digest).rstrip(b"=").decode()


class ClaimKey:
    """The key of the installation. Read once, and created by the first server that needs it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tokens: ClaimTokens | None = None

    async def tokens(self) -> ClaimTokens:
        if self._tokens is None:
            self._tokens = ClaimTokens(await self._database.run(self._read))
        return self._tokens

    async def _read(self, connection: Connection) -> bytes:
        found = await fetch_value(connection, _SQL["read_claim_key"], {})
        if found is None:
            # If two servers create one, both read the key that was stored.
            await connection.execute(_SQL["create_claim_key"], {"key": secrets.token_bytes(_KEY_BYTES)})
            found = await fetch_value(connection, _SQL["read_claim_key"], {})
        return bytes(found)
