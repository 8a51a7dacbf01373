"""What an agent that runs until it is idle waits for, and what it leaves behind, in words."""

from lineshaft.types.work import DueRetries, LeftBehind


def waiting_text(retries: DueRetries) -> str:
    return _retries(retries.count, retries.due_sec)


def left_text(left: LeftBehind) -> str:
    """Empty: nothing is left."""
    parts: list[str] = []
    if left.retrying:
        parts.append(_retries(left.retrying, left.retry_sec))
    if left.scheduled:
        first = "" if left.scheduled == 1 else ", the first one"
        parts.append(f"{_tasks(left.scheduled, 'is', 'are')} scheduled{first} {_in(left.scheduled_sec)}")
    if left.held:
        lease = "its lease expires" if left.held == 1 else "the first lease expires"
        parts.append(f"{_tasks(left.held, 'is', 'are')} held by other agents ({lease} {_in(left.lease_sec)})")
    if left.ready:
        which = "it" if left.ready == 1 else "them"
        why = f"'lineshaft why {left.ready_id}' gives the reason"
        parts.append(
            f"{_tasks(left.ready, 'is', 'are')} READY, but this agent can't claim {which} now ({why})"
        )
    return "; ".join(parts)


def _retries(count: int, seconds: float | None) -> str:
    first = "" if count == 1 else ", the first one"
    return f"{_tasks(count, 'retries', 'retry')}{first} {_in(seconds)}"


def _tasks(count: int, one: str, many: str) -> str:
    return f"1 task {one}" if count == 1 else f"{count} tasks {many}"


def _in(seconds: float | None) -> str:
    """Rounded up: a time that is nearly over isn't over."""
    if seconds is None or seconds <= 0:
        return "soon"
    for unit, length in (("days", 86_400), ("hours", 3_600)):
        if seconds >= 2 * length:
            return f"in {-(-seconds // length):.0f} {unit}"
    return f"in {-(-seconds // 1):.0f} s"
