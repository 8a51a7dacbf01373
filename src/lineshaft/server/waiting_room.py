"""Where idle agents of Lineshaft's own client wait, each on a seat that it keeps between its questions.

An agent that reaches the database itself keeps a waiter as long as it works, so that no wake-up falls between
two of its questions. So does one over HTTP. A seat that is new sends its agent to look once more, since
nobody knows what happened before it was there; one that nobody asks for any more is cleared. If who was woken
doesn't come, because its process is frozen or its network cut, another is woken.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field

from lineshaft.engine.agents import Fleet
from lineshaft.engine.feed.lane_directory import Interest, LaneDirectory
from lineshaft.engine.feed.wakeups import Waiter, Wakeups

#: Longer than any wait, and the pause between two.
_CLEARED_AFTER_SEC = 180.0
#: Who was woken claims within this; else another looks too, which costs one question.
_COMES_WITHIN_SEC = 1.0


@dataclass(slots=True)
class _Seat:
    types: frozenset[str]
    waiter: Waiter
    resources: ExitStack
    clear: asyncio.TimerHandle
    taken: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Runs between a wake-up and what its agent makes of it.
    doubt: asyncio.TimerHandle | None = None

    def trust(self) -> None:
        if self.doubt is not None:
            self.doubt.cancel()
            self.doubt = None


class WaitingRoom:
    def __init__(self, directory: LaneDirectory, wakeups: Wakeups, fleet: Fleet) -> None:
        self._directory = directory
        self._wakeups = wakeups
        self._fleet = fleet
        #: By agent and incarnation.
        self._seats: dict[tuple[str, int], _Seat] = {}

    async def wait(
        self,
        agent_id: str,
        incarnation: int,
        *,
        types: frozenset[str],
        seconds: float,
        departure: "asyncio.Task[None]",
    ) -> bool:
        """Whether there may be work. The same agent's earlier question, if it still hangs, is ended."""
        seat = self._seats.get((agent_id, incarnation))
        if seat is None or seat.types != types:
            await self._sit_down(agent_id, incarnation, types)
            return True
        seat.trust()
        if seat.taken.locked():
            seat.waiter.close()
        async with seat.taken:
            departure.add_done_callback(lambda gone: None if gone.cancelled() else seat.waiter.close())
            # Without a channel nobody is woken: then agents look by themselves.
            hears = self._wakeups.healthy
            woken = await seat.waiter.wait(min(seconds, self._wakeups.poll_interval))
        if self._seats.get((agent_id, incarnation)) is seat:
            self._keep(agent_id, incarnation, seat)
            if woken:
                seat.doubt = asyncio.get_running_loop().call_later(_COMES_WITHIN_SEC, seat.waiter.pass_on)
        return woken or not hears

    def came(self, agent_id: str, incarnation: int) -> None:
        """It looks for work, as it was told."""
        seat = self._seats.get((agent_id, incarnation))
        if seat is not None:
            seat.trust()

    async def _sit_down(self, agent_id: str, incarnation: int, types: frozenset[str]) -> None:
        agent = await self._fleet.present(agent_id, incarnation)
        interest = Interest(list(types), agent.capabilities, agent.models_available)
        await self._directory.enter(interest)
        with ExitStack() as resources:
            waiter = resources.enter_context(self._directory.waiter(interest))
            self.leave(agent_id, incarnation)
            clear = asyncio.get_running_loop().call_later(
                _CLEARED_AFTER_SEC, self.leave, agent_id, incarnation
            )
            self._seats[agent_id, incarnation] = _Seat(types, waiter, resources.pop_all(), clear)

    def _keep(self, agent_id: str, incarnation: int, seat: _Seat) -> None:
        seat.clear.cancel()
        seat.clear = asyncio.get_running_loop().call_later(
            _CLEARED_AFTER_SEC, self.leave, agent_id, incarnation
        )

    def pass_on(self, agent_id: str, incarnation: int) -> None:
        """This one could take no more: let another look too."""
        seat = self._seats.get((agent_id, incarnation))
        if seat is not None:
            seat.waiter.pass_on()

    def decline(self, agent_id: str, incarnation: int, *, unless_for: frozenset[str]) -> None:
        """It has taken all it could of these types; what woke it may be another that it waits for."""
        seat = self._seats.get((agent_id, incarnation))
        if seat is not None and not seat.types <= unless_for:
            seat.waiter.decline()

    def leave(self, agent_id: str, incarnation: int) -> None:
        """What woke it is for another."""
        seat = self._seats.pop((agent_id, incarnation), None)
        if seat is not None:
            seat.trust()
            seat.clear.cancel()
            seat.resources.close()

    def close(self) -> None:
        for agent_id, incarnation in list(self._seats):
            self.leave(agent_id, incarnation)
