"""Prefixed monotonic ULIDs."""

import os
import threading

from lineshaft.ids import IdFactory, new_id


def test_an_id_is_a_prefix_and_a_ulid() -> None:
    """R-001: the milliseconds of 2024-07-31 as the ULID specification spells them."""
    make = IdFactory(milliseconds=lambda: 1_469_918_176_385, random_bytes=lambda n: b"\xff" * n)

    assert make("task") == "task_01ARYZ6S41ZZZZZZZZZZZZZZZZ"


def test_ids_always_grow_within_a_process() -> None:
    """R-002: also within a millisecond, and when the clock steps back."""
    times = iter([5, 5, 5, 3, 3, 6, 2])
    make = IdFactory(milliseconds=lambda: next(times))

    ids = [make("task") for _ in range(7)]

    assert sorted(set(ids)) == ids


def test_ids_of_many_threads_are_distinct() -> None:
    made: list[list[str]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.extend(new_id("task") for _ in range(2000)))
        for mine in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(mine == sorted(mine) for mine in made)
    assert len({i for mine in made for i in mine}) == 8000


def test_a_forked_child_makes_different_ids() -> None:
    new_id("task")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, "\n".join(new_id("task") for _ in range(100)).encode())
        os._exit(0)
    os.close(write)
    mine = {new_id("task") for _ in range(100)}
    with os.fdopen(read) as pipe:
        theirs = set(pipe.read().split())
    os.waitpid(child, 0)

    assert len(theirs) == 100
    assert not mine & theirs
