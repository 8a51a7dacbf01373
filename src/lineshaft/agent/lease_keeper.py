"""A thread that renews the leases of all tasks of a process, whatever its event loop is doing.

One heartbeat serves all agents and tasks that are due about the same time. The thread has its own event loop
and connection, so that neither a blocking handler nor a busy pool delays it. A connection that doesn't answer
within half an interval is replaced, while there is still time.

It also releases the tasks of an agent that was asked to stop but whose event loop is blocked, and warns about
event loops that are blocked.
"""

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from lineshaft import background
from lineshaft.agent.blocked_loop import LOOK_SEC, BlockedLoops
from lineshaft.client.backend import HeartbeatTransport
from lineshaft.clock import lease_time
from lineshaft.errors import LineshaftError, StaleClaimError, UnavailableError
from lineshaft.types.work import UNREPORTED, HeartbeatAnswers, HeldTask, Presence, Release, Spent

if TYPE_CHECKING:
    from lineshaft.agent.answers import Answers
    from lineshaft.agent.execution import Execution

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
#: A heartbeat that found a task locked is repeated after this time.
_REPEAT_SEC = 0.5
#: An event loop that runs nothing for this long is blocked.
_BLOCKED_SEC = 2.0
#: How long a release of tasks may take, and the pause before the next look.
_RELEASE_SEC, _LOOK_AGAIN_SEC = 5.0, 1.0
#: The server refuses these callers whatever they send.
REFUSED = frozenset({"unauthorized", "forbidden"})


class LeaseKeeper:
    def __init__(self, transport: HeartbeatTransport) -> None:
        self._transport = transport
        self._members: dict[Presence, Answers] = {}
        #: When the next heartbeat of each agent is due, in monotonic time.
        self._due: dict[Presence, float] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: When the tasks of agents that have to stop are released. Used in the thread only.
        self._stop_by: dict[Presence, float] = {}
        self._stop_watches: set[asyncio.Task[None]] = set()
        #: No heartbeat is pending.
        self._quiet = threading.Event()
        self._quiet.set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lineshaft heartbeats", daemon=True)
        self._thread.start()

    def enter(self, member: "Answers") -> None:
        with self._lock:
            self._members[member.presence] = member
            self._due[member.presence] = time.monotonic() + member.interval_sec
        self._wake()

    async def leave(self, agent: Presence, *, at_once: bool = False) -> None:
        """When this returns, no pending heartbeat can report this agent as alive, unless `at_once`."""
        with self._lock:
            self._due.pop(agent, None)
            self._members.pop(agent, None)
            quiet = self._quiet.is_set()
        if not quiet and not at_once:
            await asyncio.to_thread(self._quiet.wait, _LAST_HEARTBEAT_SEC)

    def hurry(self, agent: Presence, within_sec: float = _HURRY_SEC) -> None:
        """Send a heartbeat for this agent soon, unless it is due anyway."""
        soon = time.monotonic() + within_sec
        with self._lock:
            if self._due.get(agent, 0.0) <= soon:
                return
            self._due[agent] = soon
        self._wake()

    def release_by(self, agent: Presence, when: float) -> None:
        """Release what this agent holds then (monotonic time) if its event loop is blocked.

        From any thread. While the event loop runs, the agent does it itself.
        """
        with contextlib.suppress(RuntimeError):  # it has just been closed
            self._loop.call_soon_threadsafe(self._expect_stop, agent, when)

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
        watching = asyncio.create_task(self._watch_loops())
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
            await background.stop(watching, *self._stop_watches)
            await self._transport.close()

    async def _watch_loops(self) -> None:
        blocked = BlockedLoops()
        while True:
            await asyncio.sleep(LOOK_SEC)
            with self._lock:
                members = list(self._members.values())
            blocked.look(members)

    def _collect(self) -> tuple[list["Answers"], float | None]:
        """The agents that are due or nearly due; else the time until the first is."""
        now = time.monotonic()
        with self._lock:
            if not self._due or (first := min(self._due.values())) > now:
                return [], None if not self._due else first - now
            members = [
                member
                for agent, member in self._members.items()
                if self._due[agent] <= now + _SLACK * member.interval_sec
            ]
            for member in members:
                self._due[member.presence] = now + member.interval_sec
            self._quiet.clear()
        return members, None

    def _postpone(self, members: list["Answers"], pause: float) -> None:
        soon = time.monotonic() + pause
        with self._lock:
            for member in members:
                if member.presence in self._due:
                    self._due[member.presence] = soon

    async def _send(self, members: list["Answers"], lost: int) -> None:
        """`lost`: how many heartbeats in a row had no answer."""
        tasks: list[HeldTask] = []
        owners: dict[tuple[str, int], Answers] = {}
        reported: list[tuple[Execution, bytes]] = []
        spent: list[tuple[Execution, Spent]] = []
        for member in members:
            for execution in member.slots.to_report():
                progress = execution.take_progress()
                if progress is not None:
                    reported.append((execution, progress))
                claim, used = execution.claim, execution.spent
                spent.append((execution, used))
                news = UNREPORTED if used == execution.known_spent else used
                tasks.append(HeldTask(claim.id, claim.epoch, member.presence, progress, news, claim.token))
                owners[claim.id, claim.epoch] = member
        quickest = min(member.interval_sec for member in members)
        sent_at = lease_time()
        share = min(_ANSWER_SHARE * 2 ** min(lost, 2), _LONGEST_SHARE)
        try:
            answers = await self._transport.beat(
                [member.presence for member in members],
                tasks,
                answer_within_sec=max(quickest * share, _QUICKEST_ANSWER_SEC),
            )
        except UnavailableError:
            # Another error may have been caused by the progress, which would then fail again.
            for execution, progress in reported:
                execution.put_back_progress(progress)
            raise
        without = answers.not_renewed | {(over.id, over.epoch) for over in answers.over}
        for execution, used in spent:
            key = execution.claim.id, execution.claim.epoch
            if key not in without and owners[key].presence in answers.agents:
                execution.lease.renew(sent_at)
            if not answers.spent_later:
                execution.spending_known(used)
        self._distribute(members, owners, answers)

    def _distribute(
        self, members: list["Answers"], owners: dict[tuple[str, int], "Answers"], answers: HeartbeatAnswers
    ) -> None:
        if answers.spent_later or answers.not_renewed:
            for member in members:
                self.hurry(member.presence, _REPEAT_SEC)
        for claim in answers.over:
            owners[claim.id, claim.epoch].on_claim_over(claim.id, claim.epoch, claim.answer, claim.reason)
        for member in members:
            if not answers.spent_later:
                member.on_spending_known()
            member.on_status(answers.agents.get(member.presence))
            if (slots := answers.slots.get(member.presence)) is not None:
                member.on_slots(slots)
            member.on_slowdown(answers.slowdowns.get(member.presence))

    # Agents that have to stop.

    def _expect_stop(self, agent: Presence, when: float) -> None:
        earlier = self._stop_by.get(agent)
        if earlier is None or when < earlier:
            self._stop_by[agent] = when
            watch = self._loop.create_task(self._watch_stop(agent, when))
            self._stop_watches.add(watch)
            watch.add_done_callback(self._stop_watches.discard)

    async def _watch_stop(self, agent: Presence, when: float) -> None:
        await asyncio.sleep(when - time.monotonic())
        # A second signal has its own watch, with an earlier time.
        while self._stop_by[agent] == when and (member := self._members.get(agent)) is not None:
            if member.slots.held() and not await _responds(member.loop):
                try:
                    await self._release(member)
                except Exception as error:  # noqa: BLE001 - tried again, until the process ends
                    _log.warning("Releasing the tasks of a blocked agent failed, retrying: %s", error)
            await asyncio.sleep(_LOOK_AGAIN_SEC)

    async def _release(self, member: "Answers") -> None:
        held = member.slots.held()
        moved = await self._transport.release(
            member.presence,
            [(Release(one.claim, spent=one.spent), one.unsaved_state()) for one in held],
            answer_within_sec=_RELEASE_SEC,
        )
        released: list[str] = []
        for execution, answer in zip(held, moved, strict=True):
            claim = execution.claim
            if answer.error is None:
                released.append(claim.id)
            if answer.error is None or isinstance(answer.error, StaleClaimError):
                member.on_released(claim.id, claim.epoch)
            else:
                _log.warning("Releasing %s failed, retrying: %s", claim.id, answer.error)
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
