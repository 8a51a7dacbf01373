"""A seed replays: the same faults at the same times, the same work asked for."""

from itertools import islice

import msgspec

from tests.chaos.faults import QUICK, Kind, schedule
from tests.chaos.workload import Operation, Submit, Workload

PROCESSES = ["agent-0", "agent-1", "server-0", "client-db"]


def test_the_same_seed_makes_the_same_faults() -> None:
    faults = schedule(1, 600, PROCESSES, list(Kind))

    assert faults == schedule(1, 600, PROCESSES, list(Kind))
    assert faults != schedule(2, 600, PROCESSES, list(Kind))
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.target for fault in faults} == {None, *PROCESSES}
    assert all(fault.at < 600 for fault in faults)


def test_a_short_run_has_each_kind() -> None:
    faults = schedule(1, 2 * len(QUICK) * 1.5, PROCESSES, QUICK, every_sec=2)

    assert {fault.kind for fault in faults} == set(QUICK)


def test_only_agents_are_stopped_and_have_clocks_and_disks() -> None:
    faults = schedule(1, 600, PROCESSES, [Kind.STOP, Kind.CLOCK, Kind.DISK_FULL])

    assert {fault.target for fault in faults} == {"agent-0", "agent-1"}


def test_the_same_seed_asks_for_the_same_work() -> None:
    def asked(seed: int, client: str = "c") -> list[Operation]:
        return list(islice(Workload(seed, client).operations(), 200))

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)
    assert asked(1) != asked(1, "other")
    submitted = [operation for operation in asked(1) if isinstance(operation, Submit)]
    ids = [name for operation in submitted for name in operation.ids]
    assert len(ids) == len(set(ids))
    assert any(operation.is_dag and operation.ceiling_usd for operation in submitted)
    plans = msgspec.json.encode([task.spec for operation in submitted for task in operation.tasks])
    for word in (b"fails", b"snoozes", b"cancels", b"spawns", b"wrong_first", b"context_refs"):
        assert word in plans
