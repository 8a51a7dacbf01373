"""The heart of a process: a thread that keeps the leases of all its tasks, whatever the event loop is doing.

One statement serves all agents and all tasks that are due about the same time. It has an event loop and a
connection of its own, so that neither a handler that blocks nor a busy pool delays it; and a connection that
doesn't answer within half an interval is replaced by a new one, while there is still time.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Collection
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from lineshaft.client.backend import HeartbeatTransport
from lineshaft.errors import UnavailableError
from lineshaft.types.work import HeartbeatAnswers, HeldTask, Presence

_log = logging.getLogger("lineshaft.agent")

#: What is due within this share of its interval goes along with what is due now.
_SLACK = 0.25
#: Of an interval, an answer may take this share; after each that didn't come twice as much, up to half a
#: lease: on a slow line a new connection alone may take longer, and none would ever be good enough.
_ANSWER_SHARE, _LONGEST_SHARE = 0.5, 1.5
_QUICKEST_ANSWER_SEC = 0.25
#: Whoever leaves waits no longer than this for a heartbeat that is under way.
_LAST_BEAT_SEC = 2.0
#: Progress is told this soon, and not more often.
_HURRY_SEC = 0.2


class Held(Protocol):
    """A claim, as the heart sees it."""

    @property
    def id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def interval_sec(self) -> float: ...

    @property
    def cost_usd(self) -> Decimal: ...

    def take_progress(self) -> bytes | None: ...

    def put_back_progress(self, progress: bytes) -> None:
        """It could not be told; unless there is newer."""
        ...


class Member(Protocol):
    """An agent, as the heart sees it. Called from the heart's thread."""

    @property
    def presence(self) -> Presence: ...

    @property
    def interval_sec(self) -> float: ...

    def held(self) -> Collection[Held]: ...

    def told(self, task_id: str, epoch: int, answer: str) -> None:
        """The claim is over: `cancel` or `lost`."""
        ...

    def told_status(self, status: str | None) -> None:
        """None: superseded."""
        ...

    def told_slots(self, slots: int) -> None:
        """How many tasks it may hold."""
        ...

    def told_slowdown(self, until: datetime | None) -> None:
        """Some of its models met a rate limit, here or elsewhere; None: none did lately."""
        ...


class LeaseKeeper:
    def __init__(self, pulse: HeartbeatTransport) -> None:
        self._pulse = pulse
        self._due: dict[Member, float] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: No heartbeat is under way.
        self._quiet = threading.Event()
        self._quiet.set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lineshaft heartbeats", daemon=True)
        self._thread.start()

    def enter(self, member: Member) -> None:
        with self._lock:
            self._due[member] = time.monotonic() + member.interval_sec
        self._wake()

    async def leave(self, member: Member) -> None:
        """When this returns, no heartbeat is under way that could still say that this one is there."""
        with self._lock:
            self._due.pop(member, None)
            quiet = self._quiet.is_set()
        if not quiet:
            await asyncio.to_thread(self._quiet.wait, _LAST_BEAT_SEC)

    def hurry(self, member: Member, within_sec: float = _HURRY_SEC) -> None:
        """Beat for this one soon; does nothing if it is due anyway."""
        soon = time.monotonic() + within_sec
        with self._lock:
            if self._due.get(member, 0.0) <= soon:
                return
            self._due[member] = soon
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has just been closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._beat_on())
        finally:
            self._loop.close()

    async def _beat_on(self) -> None:
        lost = 0
        try:
            while not self._closed:
                self._changed.clear()
                members, pause = self._collect()
                if members:
                    try:
                        await self._beat(members, lost)
                    except UnavailableError as error:
                        _log.log(
                            logging.DEBUG if lost else logging.WARNING, "Heartbeats don't arrive: %s", error
                        )
                        lost += 1
                        pause = min(min(member.interval_sec for member in members) / 4, 1.0)
                        self._postpone(members, pause)
                    except Exception:  # noqa: BLE001 - logged; a heart never stops
                        _log.exception("A heartbeat failed; the next one comes in its turn")
                    else:
                        lost = 0
                    finally:
                        self._quiet.set()
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
        finally:
            await self._pulse.close()

    def _collect(self) -> tuple[list[Member], float | None]:
        """Who is due, with those that are nearly due; else for how long nobody is."""
        now = time.monotonic()
        with self._lock:
            if not self._due or (first := min(self._due.values())) > now:
                return [], None if not self._due else first - now
            members = [
                member for member, due in self._due.items() if due <= now + _SLACK * member.interval_sec
            ]
            for member in members:
                self._due[member] = now + member.interval_sec
            self._quiet.clear()
        return members, None

    def _postpone(self, members: list[Member], pause: float) -> None:
        soon = time.monotonic() + pause
        with self._lock:
            for member in members:
                if member in self._due:
                    self._due[member] = soon

    async def _beat(self, members: list[Member], lost: int) -> None:
        """`lost`: how many in a row didn't arrive."""
        tasks: list[HeldTask] = []
        owners: dict[tuple[str, int], Member] = {}
        told: list[tuple[Held, bytes]] = []
        for member in members:
            agent_id = member.presence.agent_id
            for held in member.held():
                progress = held.take_progress()
                if progress is not None:
                    told.append((held, progress))
                cost = held.cost_usd
                tasks.append(HeldTask(held.id, held.epoch, agent_id, progress, cost or None))
                owners[held.id, held.epoch] = member
        quickest = min(member.interval_sec for member in members)
        share = min(_ANSWER_SHARE * 2 ** min(lost, 2), _LONGEST_SHARE)
        try:
            answers = await self._pulse.beat(
                [member.presence for member in members],
                tasks,
                answer_within_sec=max(quickest * share, _QUICKEST_ANSWER_SEC),
            )
        except UnavailableError:
            # (Not after another error: it may be what was wrong.)
            for held, progress in told:
                held.put_back_progress(progress)
            raise
        self._spread(members, owners, answers)

    def _spread(
        self, members: list[Member], owners: dict[tuple[str, int], Member], answers: HeartbeatAnswers
    ) -> None:
        for claim in answers.over:
            owners[claim.id, claim.epoch].told(claim.id, claim.epoch, claim.answer)
        for member in members:
            member.told_status(answers.agents.get(member.presence.agent_id))
            if (slots := answers.slots.get(member.presence.agent_id)) is not None:
                member.told_slots(slots)
            member.told_slowdown(answers.slowdowns.get(member.presence.agent_id))
