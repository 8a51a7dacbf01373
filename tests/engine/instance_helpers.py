"""Processes of one agent, and what the agent shows of them."""

from typing import Any

from lineshaft.types import AgentInfo, NewAgent, RegisteredAgent
from lineshaft.types.work import Presence
from tests.world import World


async def replica(world: World, name: str, agent_id: str = "writer", **fields: Any) -> RegisteredAgent:
    return await world.engine.fleet.register(NewAgent(id=agent_id, instance=name, **fields))


async def read(world: World, agent_id: str = "writer") -> AgentInfo:
    return await world.engine.fleet.read(agent_id)


def instances(agent: AgentInfo) -> dict[str, str]:
    """The status of each instance, the newest first."""
    return {each.instance: each.status for each in agent.instances}


async def beats(world: World, agent: AgentInfo) -> bool:
    """Whether a heartbeat finds the instance."""
    instance = Presence(agent.id, agent.incarnation)
    return instance in (await world.engine.work.heartbeat([instance], [])).agents
