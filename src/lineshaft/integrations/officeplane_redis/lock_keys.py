"""OfficePlane's document locks in Redis. Each call is one script, so nothing changes while it runs.

`{prefix}doclock:X` has the holder, as 003 has it: any program may take it with SET NX EX 600 and delete it
with a compare-and-delete. Beside it, `lineshaft:{prefix}doclock:X` has Lineshaft's own holder with the number
of the grant, so that a late release can't end a later grant of the same task. `lineshaft:doclock-data` tells
whether Redis still has the data that it had before.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from redis.asyncio import Redis

#: As in 003.
TTL_SEC = 600
_OWN = "lineshaft:doclock:"
_DATA = "lineshaft:doclock-data"

#: KEYS: lock, own, data. ARGV: holder, token, ttl, former holder of ours, id of new data, id of known data.
_TAKE = """
local data = redis.call('GET', KEYS[3])
if not data then
    data = ARGV[5]
    redis.call('SET', KEYS[3], data)
end
if ARGV[6] ~= '' and ARGV[6] ~= data then return {'lost', data, ''} end
local held = redis.call('GET', KEYS[1])
local own = redis.call('HMGET', KEYS[2], 'holder', 'token')
if held and held ~= ARGV[1] then
    if held ~= own[1] then return {'held', held, ''} end
    if held ~= ARGV[4] or tonumber(own[2]) >= tonumber(ARGV[2]) then return {'held', held, own[1]} end
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
redis.call('HSET', KEYS[2], 'holder', ARGV[1], 'token', ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return {'taken', data, ''}
"""
#: KEYS: lock, own. ARGV: holder, token, ttl. A lock that is gone, with Redis' data or by hand, is taken.
_RENEW = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
local own = redis.call('HMGET', KEYS[2], 'holder', 'token')
if own[1] ~= ARGV[1] or tonumber(own[2]) < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[2], 'holder', ARGV[1], 'token', ARGV[2])
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
return ''
"""
#: KEYS: lock, own. ARGV: holder, token.
_RELEASE = """
local own = redis.call('HMGET', KEYS[2], 'holder', 'token')
if own[1] == ARGV[1] and own[2] == ARGV[2] then
    redis.call('DEL', KEYS[2])
    if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
end
return ''
"""


class Grant(Struct, frozen=True):
    """A document lock that Lineshaft's database has granted."""

    document: str
    #: The task; for the children of a batch, the batch.
    holder: str
    #: It grows with each grant.
    token: int


class Taken(Struct, frozen=True):
    """The answer to a take: `taken`, `held` by another, or the data of Redis was `lost`."""

    outcome: str
    #: The id of Redis' data.
    data: str = ""
    holder: str = ""
    #: The holder was recorded by a Lineshaft, this one or another.
    by_lineshaft: bool = False


#: Of a holder. Ids of tasks are shorter.
_MOST_SHOWN = 200


class LockKeys:
    def __init__(self, client: "Redis", prefix: str) -> None:
        self._client = client
        self._prefix = prefix + "doclock:"
        self._take = client.register_script(_TAKE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)

    async def take(self, grant: Grant, *, new_data: str, known_data: str, former: str = "") -> Taken:
        """`former`: a holder whose lock Lineshaft's database has given to this one."""
        keys = [*self._keys(grant.document), _DATA]
        arguments: list[str | int] = [grant.holder, grant.token, TTL_SEC, former, new_data, known_data]
        outcome, said, own = map(_text, await self._take(keys=keys, args=arguments))
        if outcome == "held":
            return Taken(outcome, holder=said, by_lineshaft=own == said)
        return Taken(outcome, data=said)

    async def renew(self, grant: Grant) -> str:
        """Returns another holder, if there is one."""
        arguments: list[str | int] = [grant.holder, grant.token, TTL_SEC]
        said: bytes = await self._renew(keys=self._keys(grant.document), args=arguments)
        return _text(said)

    async def release(self, grant: Grant) -> None:
        await self._release(keys=self._keys(grant.document), args=[grant.holder, grant.token])

    async def holders(self, documents: Sequence[str]) -> Mapping[str, str | None]:
        found: list[Any] = await self._client.mget([self._prefix + document for document in documents])
        return {
            document: None if holder is None else _text(holder)
            for document, holder in zip(documents, found, strict=True)
        }

    def _keys(self, document: str) -> list[str]:
        return [self._prefix + document, _OWN + self._prefix + document]


def _text(value: bytes) -> str:
    """Short, and of characters that PostgreSQL can store: other programs may write anything there."""
    return value[:_MOST_SHOWN].decode(errors="backslashreplace").replace("\0", "\\x00")
