"""Carries out the faults of a schedule."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.chaos.faults import OF_REDIS, Fault, Kind
from tests.chaos.fleet import Member
from tests.chaos.redis import Redis


class Disk:
    """A small disk of an agent's own, which can be filled up."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def fill(self) -> None:
        with (self.place / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(b"\0" * 4096):
                    pass
            except OSError:
                return

    def clear(self) -> None:
        (self.place / "ballast").unlink(missing_ok=True)


class Nemesis:
    def __init__(
        self,
        cluster: Cluster,
        members: Mapping[str, Member],
        disks: Mapping[str, Disk],
        clocks: Mapping[str, Path],
        log: Callable[[str], None],
        *,
        redis: Redis | None = None,
    ) -> None:
        """`clocks`: files that say by how much an agent's clock is off."""
        self._redis = redis
        self._cluster = cluster
        self._members = members
        self._disks = disks
        self._clocks = clocks
        self._log = log
        self._database = asyncio.Lock()
        self.done: Counter[Kind] = Counter()
        self.skipped: Counter[Kind] = Counter()
        #: What went wrong with a fault itself; then the run proves less than it says.
        self.trouble: list[str] = []

    async def run(self, faults: Sequence[Fault], began: float) -> None:
        """All of them; those that last do so beside the next ones."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, began + fault.at - time.monotonic()))
                group.create_task(self._commit(fault))
        self.heal()

    async def _commit(self, fault: Fault) -> None:
        try:
            happened = await self._do(fault)
        except Exception as error:  # noqa: BLE001 - reported at the end; other faults go on
            self.trouble.append(f"{fault}: {type(error).__name__}: {error}")
            self._log(f"{fault} went wrong: {error}")
            return
        (self.done if happened else self.skipped)[fault.kind] += 1

    async def _do(self, fault: Fault) -> bool:  # noqa: C901, PLR0912 - one case a kind
        member = self._members.get(fault.target or "")
        match fault.kind:
            case (
                Kind.RESTART_FAST | Kind.RESTART_IMMEDIATE | Kind.TERMINATE | Kind.FAIL_OVER | Kind.READ_ONLY
            ):
                async with self._database:
                    self._log(str(fault))
                    await self._hit_database(fault)
                return True
            case _:
                self._log(str(fault))
        if fault.kind in OF_REDIS and self._redis is not None:
            await self._redis.hit(fault)
            return True
        if member is None:
            raise LookupError(f"there is no {fault.target}")
        match fault.kind:
            case Kind.KILL:
                return await member.kill(fault.seconds)
            case Kind.STOP:
                return await member.terminate(fault.seconds)
            case Kind.PAUSE:
                return await member.pause(fault.seconds)
            case Kind.RESET:
                for proxy in member.line.proxies:
                    proxy.reset()
            case Kind.BLACK_HOLE:
                for proxy in member.line.proxies:
                    proxy.swallow()
            case Kind.HOLD:
                for proxy in member.line.proxies:
                    proxy.hold()
                await asyncio.sleep(fault.seconds)
                for proxy in member.line.proxies:
                    proxy.restore()
            case Kind.CLOCK:
                # An hour ahead, then an hour behind.
                for offset in ("3600", "-3600"):
                    self._clocks[member.name].write_text(offset)
                    await asyncio.sleep(fault.seconds / 2)
            case Kind.DISK_FULL:
                self._disks[member.name].fill()
                await asyncio.sleep(fault.seconds)
                self._disks[member.name].clear()
            case _:
                raise AssertionError(fault)
        return True

    async def _hit_database(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.RESTART_FAST:
                await self._cluster.restart(signal.SIGINT, fault.seconds)
            case Kind.RESTART_IMMEDIATE:
                await self._cluster.restart(signal.SIGQUIT, fault.seconds)
            case Kind.TERMINATE:
                await self._cluster.terminate_backends()
            case Kind.FAIL_OVER:
                await self._cluster.fail_over()
                await self._cluster.replace_standby()
            case Kind.READ_ONLY:
                await self._cluster.only_read(fault.seconds)
            case _:
                raise AssertionError(fault)

    def heal(self) -> None:
        for member in self._members.values():
            member.resume()
            for proxy in member.line.proxies:
                proxy.restore()
        for disk in self._disks.values():
            disk.clear()
