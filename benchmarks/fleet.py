"""`make bench-fleet`: the CPU that a fleet of agents with long tasks costs PostgreSQL.

Each instance holds one task of 60 s and sends a heartbeat every 30 s. Calls come at the times at which such a
fleet makes them, one instance and one task at a time. `--json FILE` writes the figures as a flat object, and
`--quick` runs everything small to see that it works.
"""

import argparse
import asyncio
import heapq
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Report, fresh_database, progress, server
from benchmarks.engine import tasks
from lineshaft.engine.engine import Engine
from lineshaft.types import NewAgent
from lineshaft.types.work import ClaimRef, Completion, HeldTask, Presence

TASK_SEC, HEARTBEAT_SEC = 60.0, 30.0
#: As many as a server has. Agents reach the database through servers: it can't serve 10,000 connections.
CONNECTIONS = 10
INSTANCES_OF_AN_AGENT = 100


@dataclass(frozen=True, slots=True)
class Sizes:
    instances: int = 10_000
    seconds: float = 90.0


QUICK = Sizes(50, 2.0)


class Fleet:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.held: dict[Presence, ClaimRef] = {}
        self.calls = 0
        self.worst_lag_sec = 0.0

    async def hire(self, number: int) -> None:
        """Register instances, each with its first task."""
        for _ in range(3):
            await self._engine.submission.submit(tasks(number))
        waiting = iter(range(number))

        async def one_by_one() -> None:
            for n in waiting:
                agent_id = f"agent-{n // INSTANCES_OF_AN_AGENT}"
                view = await self._engine.fleet.register(
                    NewAgent(id=agent_id, instance=str(n), max_concurrent_tasks=1)
                )
                claim = await self._engine.claims.claim(agent_id, view.incarnation, start=True)
                self.held[Presence(agent_id, view.incarnation)] = ClaimRef(
                    claim.tasks[0].id, claim.tasks[0].epoch
                )

        await asyncio.gather(*(one_by_one() for _ in range(CONNECTIONS)))

    async def work(self, seconds: float) -> None:
        """Make every call at its time. The instances' times are spread evenly."""
        start = time.monotonic()
        calls: list[tuple[float, int, bool, Presence]] = []
        numbers = itertools.count()
        for n, instance in enumerate(self.held):
            share = n / len(self.held)
            # A heartbeat falls between two ends of tasks.
            calls.append((start + share * TASK_SEC, next(numbers), True, instance))
            calls.append((start + (share + 0.25) % 1 * HEARTBEAT_SEC, next(numbers), False, instance))
        heapq.heapify(calls)

        async def one_by_one() -> None:
            while calls and calls[0][0] < start + seconds:
                at, _, ends, instance = heapq.heappop(calls)
                following = (at + (TASK_SEC if ends else HEARTBEAT_SEC), next(numbers), ends, instance)
                heapq.heappush(calls, following)
                await asyncio.sleep(at - time.monotonic())
                self.worst_lag_sec = max(self.worst_lag_sec, time.monotonic() - at)
                await (self._finish(instance) if ends else self._beat(instance))
                self.calls += 1

        await asyncio.gather(*(one_by_one() for _ in range(CONNECTIONS)))

    async def _finish(self, instance: Presence) -> None:
        moved, claim = await self._engine.work.complete_and_claim(Completion(self.held[instance], b'"done"'))
        if moved.error is not None:
            raise moved.error
        self.held[instance] = ClaimRef(claim.tasks[0].id, claim.tasks[0].epoch)

    async def _beat(self, instance: Presence) -> None:
        held = self.held[instance]
        response = await self._engine.work.heartbeat([instance], [HeldTask(held.id, held.epoch, instance)])
        if response.over:
            raise RuntimeError(f"A claim was lost: {response.over}")


async def postmaster(engine: Engine) -> int:
    async with engine.database.connection() as connection:
        return int(_status(Path(f"/proc/{connection.info.backend_pid}"))[1])


def cpu_sec(postmaster_pid: int) -> float:
    """CPU seconds of all processes of the server, those that have ended included."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = _status(folder)
            except FileNotFoundError:
                continue
            if int(folder.name) == postmaster_pid:
                ticks += sum(int(field) for field in status[11:15])
            elif int(status[1]) == postmaster_pid:
                ticks += sum(int(field) for field in status[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def _status(process: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent and so on."""
    return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


async def main(args: argparse.Namespace) -> None:
    sizes = QUICK if args.quick else Sizes()
    report = Report(f"{sizes.instances:,} instances, one task of {TASK_SEC:g} s each")
    with server() as running, progress(2) as step:
        async with Engine(fresh_database(running, "bench_fleet"), max_connections=CONNECTIONS) as engine:
            fleet = Fleet(engine)
            step("registering")
            await fleet.hire(sizes.instances)
            step("working")
            server_pid = await postmaster(engine)
            before, start = cpu_sec(server_pid), time.monotonic()
            await fleet.work(sizes.seconds)
            share = (cpu_sec(server_pid) - before) / (time.monotonic() - start)
    report.figure("fleet_calls_per_sec", fleet.calls / sizes.seconds, "calls/s")
    report.figure("fleet_database_cores", share, "cores")
    report.figure("fleet_database_cores_per_1000", share / sizes.instances * 1000, "cores")
    report.figure("fleet_worst_lag", fleet.worst_lag_sec, "s")
    report.show(args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    asyncio.run(main(parser.parse_args()))
