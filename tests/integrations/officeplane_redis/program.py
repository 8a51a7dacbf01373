"""Another program that edits documents, written from document 003: it knows nothing about Lineshaft."""

from redis import Redis

#: 003: "only the holder can release".
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Program:
    def __init__(self, redis: Redis, name: str) -> None:
        self.redis = redis
        self.name = name

    def lock(self, document: str) -> bool:
        return bool(self.redis.set(f"officeplane:doclock:{document}", self.name, nx=True, ex=600))

    def unlock(self, document: str) -> None:
        self.redis.eval(_RELEASE, 1, f"officeplane:doclock:{document}", self.name)


def holder(redis: Redis, document: str) -> str | None:
    found = redis.get(f"officeplane:doclock:{document}")
    return None if found is None else found.decode()  # type: ignore[union-attr] # a blocking client
