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
    return "; ".join(parts)


def _retries(count: int, seconds: float | None) -> str:
    first = "" if count == 1 else ", the first one"
    return f"{_tasks(count, 'retries', 'retry')}{first} {_in(seconds)}"


def _tasks(count: int, one: str, many: str) -> str:
    return f"1 task {one}" if count == 1 else f"{count} tasks {many}"


def _in(seconds: float | None) -> str:
    """Rounded up: a time that is nearly over isn't over."""
    return "soon" if seconds is None or seconds <= 0 else f"in {int(-(-seconds // 1))} s"
