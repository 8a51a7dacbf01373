"""Readers of the feed see every event once, and causes before their effects."""

from collections import defaultdict
from collections.abc import Iterator

from lineshaft.engine.feed.events import Cursor
from tests.chaos.evidence import EventFact, Evidence

#: Where a reader goes on after an event.
Place = tuple[int, int]


def place_after(event: EventFact) -> Place:
    return (event.seq + 1, 0) if event.last else (event.seq, event.n)


def readers_see_each_event_once(evidence: Evidence) -> Iterator[str]:
    places = {place_after(event): number for number, event in enumerate(evidence.events)}
    for reader, seen in _seen(evidence).items():
        numbers: list[int] = []
        for place, kind, task_id in seen:
            number = places.get(place)
            if number is None:
                yield f"{reader} saw {kind} of {task_id} at {place}, which isn't there"
            else:
                numbers.append(number)
        if len(set(numbers)) < len(numbers):
            twice = [evidence.events[n] for n in sorted(set(numbers)) if numbers.count(n) > 1]
            yield f"{reader} saw {len(twice)} events twice, such as {twice[0]}"
        # What was written after it had stopped is nothing that it missed.
        missed = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
        if missed:
            yield f"{reader} missed {len(missed)} events, such as {evidence.events[missed[0]]}"


def readers_see_causes_first(evidence: Evidence) -> Iterator[str]:
    """The events of a task in their order, and a task's claims after the completion of what it waits for."""
    events = {place_after(event): event for event in evidence.events}
    upstream: dict[str, list[str]] = defaultdict(list)
    for edge in evidence.edges:
        if edge.kind == "success":
            upstream[edge.task_id].append(edge.depends_on)
    for reader, seen in _seen(evidence).items():
        last: dict[str, Place] = {}
        completed: set[str] = set()
        for place, kind, task_id in seen:
            event = events.get(place)
            if event is None or task_id is None:
                continue
            here = (event.seq, event.n)
            if here < last.get(task_id, (0, 0)):
                yield f"{reader} saw {kind} of {task_id} after what came later"
            last[task_id] = here
            if kind == "task.completed":
                completed.add(task_id)
            elif kind == "task.claimed" and (open_ones := set(upstream[task_id]) - completed):
                yield f"{reader} saw {task_id} claimed before {sorted(open_ones)} completed"


def _seen(evidence: Evidence) -> dict[str, list[tuple[Place, str, str | None]]]:
    found: dict[str, list[tuple[Place, str, str | None]]] = defaultdict(list)
    for record in evidence.records:
        if record["what"] == "page":
            for cursor, kind, task_id in record["events"]:
                decoded = Cursor.decode(cursor)
                found[record["who"]].append(((decoded.seq, decoded.skip), kind, task_id))
    return found
