"""Processes of one agent have incarnations of their own, and only dead ones are reported as dead."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.evidence import Evidence
from tests.chaos.history import Record


def _claims(evidence: Evidence) -> dict[tuple[str, int], Record]:
    return {(r["task"], r["epoch"]): r for r in evidence.records if r["what"] == "claimed"}


def an_incarnation_is_one_process(evidence: Evidence) -> Iterator[str]:
    processes: dict[tuple[str, int], set[int]] = defaultdict(set)
    for record in _claims(evidence).values():
        processes[record["agent"], record["incarnation"]].add(record["pid"])
    for (agent, incarnation), pids in processes.items():
        if len(pids) > 1:
            yield f"incarnation {incarnation} of {agent} was given to the processes {sorted(pids)}"


def attempts_name_their_process(evidence: Evidence) -> Iterator[str]:
    claims = _claims(evidence)
    for attempt in evidence.attempts:
        claim = claims.get((attempt.task_id, attempt.epoch))
        if claim is None:
            continue
        holder, recorded = (claim["agent"], claim["incarnation"]), (attempt.agent_id, attempt.incarnation)
        if recorded != holder:
            yield f"claim {attempt.epoch} of {attempt.task_id} was given to {holder}, recorded for {recorded}"


def only_dead_processes_are_reported(evidence: Evidence) -> Iterator[str]:
    """A process whose tasks failed as `agent_restarted` claims nothing afterwards.

    Every instance has a name of its own here, so that only its siblings can have reported it.
    """
    claims = _claims(evidence)
    claimed_at: dict[tuple[str, int], int] = {}
    failed_at: dict[tuple[str, int], int] = {}
    for event in evidence.events:
        if event.task_id is not None and event.kind in {"task.claimed", "task.failed"}:
            when = claimed_at if event.kind == "task.claimed" else failed_at
            when[event.task_id, event.epoch or 0] = event.seq
    last: dict[int, int] = defaultdict(int)
    for claim, record in claims.items():
        last[record["pid"]] = max(last[record["pid"]], claimed_at.get(claim, 0))
    for attempt in evidence.attempts:
        claim = attempt.task_id, attempt.epoch
        if attempt.error != "agent_restarted" or claim not in claims or claim not in failed_at:
            continue
        pid = claims[claim]["pid"]
        if last[pid] > failed_at[claim]:
            yield f"process {pid} of {attempt.agent_id} was reported as dead, but claimed tasks afterwards"
