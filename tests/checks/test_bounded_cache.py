"""The cache of compiled schemas."""

from lineshaft.checks.bounded_cache import BoundedCache


def test_it_is_limited_by_the_size_of_its_entries() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100)
    for number, name in enumerate("abc"):
        cache.put(name, number, 40)

    assert [cache.get(name) for name in "abc"] == [None, 1, 2]
    assert cache.bytes == 80


def test_what_was_used_last_is_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100)
    cache.put("a", 1, 50)
    cache.put("b", 2, 50)
    cache.get("a")
    cache.put("c", 3, 50)

    assert cache.get("a") == 1
    assert cache.get("b") is None


def test_an_entry_that_is_put_again_counts_once() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100)
    cache.put("a", 1, 60)
    cache.put("a", 2, 30)

    assert (cache.get("a"), cache.bytes) == (2, 30)
