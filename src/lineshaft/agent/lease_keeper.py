"""A thread that renews the leases of all tasks of a process, whatever its event loop is doing.

One heartbeat serves all agents and tasks that are due about the same time. The thread has its own event loop
and connection, so that neither a blocking handler nor a busy pool delays it. A connection that doesn't answer
within half an interval is replaced, while there is still time.

It also releases the tasks of an agent that was asked to stop but whose event loop is blocked.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Collection
from datetime import datetime
from typing import Protocol

from lineshaft.client.backend import HeartbeatTransport
from lineshaft.errors import LineshaftError, StaleClaimError, UnavailableError
from lineshaft.types.work import UNREPORTED, ClaimRef, HeartbeatAnswers, HeldTask, Presence, Release, Spent

_log = logging.getLogger("lineshaft.agent")

#: Agents that are due within this share of their interval are included.
_SLACK = 0.25
#: The share of an interval that an answer may take. It doubles after each missing answer, up to half a lease:
#: on a slow network a new connection alone may take longer than the first share.
_ANSWER_SHARE, _LONGEST_SHARE = 0.5, 1.5
_QUICKEST_ANSWER_SEC = 0.25
#: How long an agent that leaves waits for a pending heartbeat.
_LAST_HEARTBEAT_SEC = 2.0
#: How long `close` waits for the thread, which may be in a call that has its own limit.
_ENDS_WITHIN_SEC = 10.0
#: How soon, and how often at most, progress and spending are sent.
_HURRY_SEC = 0.2
#: A report of spending that found its task locked is repeated after this time.
_REPEAT_SEC = 0.5
#: An event loop that runs nothing for this long is blocked.
_BLOCKED_SEC = 2.0
#: How long a release of tasks may take, and the pause before the next look.
_RELEASE_SEC, _LOOK_AGAIN_SEC = 5.0, 1.0
#: The server refuses these callers whatever they send.
REFUSED = frozenset({"unauthorized", "forbidden"})


class Held(Protocol):
    """A claim whose lease is kept, or whose last spending is still to be reported."""

    #: What the server knows to be spent.
    known_spent: Spent

    @property
    def claim(self) -> ClaimRef: ...

    @property
    def spent(self) -> Spent: ...

    def unsaved_state(self) -> bytes | None: ...

    def take_progress(self) -> bytes | None: ...

    def put_back_progress(self, progress: bytes) -> None:
        """Keep it for the next heartbeat, unless there is newer."""
        ...


class Member(Protocol):
    """An agent whose tasks are kept. Its methods are called from the heartbeat thread."""

    @property
    def presence(self) -> Presence: ...

    @property
    def interval_sec(self) -> float: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where its handlers run."""
        ...

    def held(self) -> Collection[Held]: ...

    def to_report(self) -> Collection[Held]:
        """What is held, after ended claims that have spent more than the server knows."""
        ...

    def on_spending_known(self) -> None:
        """The server knows what was spent when the last heartbeat was sent."""
        ...

    def on_claim_over(self, task_id: str, epoch: int, answer: str, reason: str | None) -> None:
        """The claim is over: `cancel` or `lost`. With a reason it is held, but over that limit."""
        ...

    def on_released(self, task_id: str, epoch: int) -> None:
        """The task was released, because the agent has to stop and its event loop is blocked."""
        ...

    def on_status(self, status: str | None) -> None:
        """None: superseded."""
        ...

    def on_refused(self, error: LineshaftError) -> None:
        """The server accepts no calls from this process."""
        ...

    def on_slots(self, slots: int) -> None:
        """How many tasks it may hold."""
        ...

    def on_slowdown(self, until: datetime | None) -> None:
        """Some of its models are slowed down until then; None: no model is."""
        ...


class LeaseKeeper:
    def __init__(self, transport: HeartbeatTransport) -> None:
        self._transport = transport
        self._due: dict[Member, float] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: Agents that have to stop: when their tasks are released. Used in the thread only.
        self._stop_by: dict[Member, float] = {}
        self._stop_watches: set[asyncio.Task[None]] = set()
        #: No heartbeat is pending.
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

    async def leave(self, member: Member, *, at_once: bool = False) -> None:
        """When this returns, no pending heartbeat can report this agent as alive, unless `at_once`."""
        with self._lock:
            self._due.pop(member, None)
            quiet = self._quiet.is_set()
        if not quiet and not at_once:
            await asyncio.to_thread(self._quiet.wait, _LAST_HEARTBEAT_SEC)

    def hurry(self, member: Member, within_sec: float = _HURRY_SEC) -> None:
        """Send a heartbeat for this agent soon, unless it is due anyway."""
        soon = time.monotonic() + within_sec
        with self._lock:
            if self._due.get(member, 0.0) <= soon:
                return
            self._due[member] = soon
        self._wake()

    def release_by(self, member: Member, when: float) -> None:
        """Release what this agent holds then (monotonic time) if its event loop is blocked.

        From any thread. While the event loop runs, the agent does it itself.
        """
        with contextlib.suppress(RuntimeError):  # it has just been closed
            self._loop.call_soon_threadsafe(self._expect_stop, member, when)

    def close(self) -> None:
        """End the thread. One that hangs doesn't keep the process: it ends with it."""
        self._closed = True
        self._wake()
        self._thread.join(_ENDS_WITHIN_SEC)
        if self._thread.is_alive():
            _log.warning("The thread of heartbeats didn't end within %g s", _ENDS_WITHIN_SEC)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has just been closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._send_all())
        finally:
            self._loop.close()

    async def _send_all(self) -> None:
        lost = 0
        try:
            while not self._closed:
                self._changed.clear()
                members, pause = self._collect()
                if members:
                    try:
                        await self._send(members, lost)
                    except UnavailableError as error:
                        _log.log(logging.DEBUG if lost else logging.WARNING, "Heartbeats fail: %s", error)
                        lost += 1
                        pause = min(min(member.interval_sec for member in members) / 4, 1.0)
                        self._postpone(members, pause)
                    except Exception as error:  # noqa: BLE001 - logged; heartbeats must go on
                        if isinstance(error, LineshaftError) and error.code in REFUSED:
                            for member in members:
                                member.on_refused(error)
                        else:
                            _log.exception("A heartbeat failed; the next one is sent as usual")
                    else:
                        lost = 0
                    finally:
                        self._quiet.set()
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
        finally:
            for watch in self._stop_watches:
                watch.cancel()
            if self._stop_watches:
                await asyncio.wait(self._stop_watches)
            await self._transport.close()

    def _collect(self) -> tuple[list[Member], float | None]:
        """The agents that are due or nearly due; else the time until the first is."""
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

    async def _send(self, members: list[Member], lost: int) -> None:
        """`lost`: how many heartbeats in a row had no answer."""
        tasks: list[HeldTask] = []
        owners: dict[tuple[str, int], Member] = {}
        reported: list[tuple[Held, bytes]] = []
        spent: list[tuple[Held, Spent]] = []
        for member in members:
            for held in member.to_report():
                progress = held.take_progress()
                if progress is not None:
                    reported.append((held, progress))
                claim, used = held.claim, held.spent
                spent.append((held, used))
                news = UNREPORTED if used == held.known_spent else used
                tasks.append(HeldTask(claim.id, claim.epoch, member.presence, progress, news, claim.token))
                owners[claim.id, claim.epoch] = member
        quickest = min(member.interval_sec for member in members)
        share = min(_ANSWER_SHARE * 2 ** min(lost, 2), _LONGEST_SHARE)
        try:
            answers = await self._transport.beat(
                [member.presence for member in members],
                tasks,
                answer_within_sec=max(quickest * share, _QUICKEST_ANSWER_SEC),
            )
        except UnavailableError:
            # Not after another error, which it may have caused.
            for held, progress in reported:
                held.put_back_progress(progress)
            raise
        if answers.spent_later:
            for member in members:
                self.hurry(member, _REPEAT_SEC)
        else:
            for held, used in spent:
                held.known_spent = used
            for member in members:
                member.on_spending_known()
        self._distribute(members, owners, answers)

    def _distribute(
        self, members: list[Member], owners: dict[tuple[str, int], Member], answers: HeartbeatAnswers
    ) -> None:
        for claim in answers.over:
            owners[claim.id, claim.epoch].on_claim_over(claim.id, claim.epoch, claim.answer, claim.reason)
        for member in members:
            member.on_status(answers.agents.get(member.presence))
            if (slots := answers.slots.get(member.presence)) is not None:
                member.on_slots(slots)
            member.on_slowdown(answers.slowdowns.get(member.presence))

    # Agents that have to stop.

    def _expect_stop(self, member: Member, when: float) -> None:
        known = self._stop_by.get(member)
        self._stop_by[member] = when if known is None else min(known, when)
        if known is None or when < known:
            watch = self._loop.create_task(self._watch_stop(member, when))
            self._stop_watches.add(watch)
            watch.add_done_callback(self._stop_watches.discard)

    async def _watch_stop(self, member: Member, when: float) -> None:
        await asyncio.sleep(when - time.monotonic())
        # A second signal has its own watch, with an earlier time.
        while self._stop_by[member] == when and member in self._due:
            if member.held() and not await _responds(member.loop):
                try:
                    await self._release(member)
                except Exception as error:  # noqa: BLE001 - tried again, until the process ends
                    _log.warning("Releasing the tasks of a blocked agent failed, retrying: %s", error)
            await asyncio.sleep(_LOOK_AGAIN_SEC)

    async def _release(self, member: Member) -> None:
        held = list(member.held())
        moved = await self._transport.release(
            member.presence,
            [(Release(one.claim, spent=one.spent), one.unsaved_state()) for one in held],
            answer_within_sec=_RELEASE_SEC,
        )
        released: list[str] = []
        for one, answer in zip(held, moved, strict=True):
            if answer.error is None:
                released.append(one.claim.id)
            if answer.error is None or isinstance(answer.error, StaleClaimError):
                member.on_released(one.claim.id, one.claim.epoch)
            else:
                _log.warning("Releasing %s failed, retrying: %s", one.claim.id, answer.error)
        if released:
            _log.warning(
                "%s: has to stop, but a handler blocks its event loop. Released %s",
                member.presence.agent_id,
                ", ".join(released),
            )


async def _responds(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether another thread's event loop runs something soon."""
    here, responded = asyncio.get_running_loop(), asyncio.Event()

    def respond() -> None:
        with contextlib.suppress(RuntimeError):  # too late
            here.call_soon_threadsafe(responded.set)

    try:
        loop.call_soon_threadsafe(respond)
        async with asyncio.timeout(_BLOCKED_SEC):
            await responded.wait()
    except TimeoutError:
        return False
    except RuntimeError:  # it is closed
        return True
    return True
