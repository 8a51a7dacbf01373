"""`manage.py lineshaft_agent`: runs agents with Django set up."""

import argparse
import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections
from django.utils.module_loading import autodiscover_modules
from msgspec.structs import replace

from lineshaft.agent.agent import Agent
from lineshaft.agent.program import run_agents
from lineshaft.cli.agent_modules import load_agents
from lineshaft.cli.usage import UsageError
from lineshaft.client.lineshaft import Lineshaft
from lineshaft.errors import LineshaftError
from lineshaft.integrations.django.submission import dsn_of


class Command(BaseCommand):
    help = "Run agents, with Django set up. Exit codes: 0 stopped or idle, 1 failure, 2 wrong usage."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "agents",
            nargs="*",
            metavar="MODULE:AGENT",
            help="such as shop.agents:agent (default: all agents in the modules 'agents' of installed apps)",
        )
        parser.add_argument(
            "--until-idle", action="store_true", help="exit when no tasks are left that could run now"
        )
        parser.add_argument(
            "--retries-within",
            type=float,
            default=60.0,
            metavar="SEC",
            help="with --until-idle: wait for retries that are due within this time (default: 60)",
        )

    def handle(self, *_: Any, agents: list[str], until_idle: bool, retries_within: float, **__: Any) -> None:
        try:
            found = load_agents(agents) if agents else _discovered()
            for agent in found:
                _keep_connections_fresh(agent)
            asyncio.run(_run(found, until_idle=until_idle, retries_within_sec=retries_within))
        except UsageError as error:
            raise CommandError(str(error), returncode=2) from None
        except LineshaftError as error:
            raise CommandError(str(error), returncode=1) from None


def _discovered() -> list[Agent]:
    """The agents in the modules `agents` of the installed apps."""
    autodiscover_modules("agents")
    found: dict[int, Agent] = {}
    for app in apps.get_app_configs():
        module = getattr(app.module, "agents", None)
        found |= {id(value): value for value in vars(module or app).values() if isinstance(value, Agent)}
    if not found:
        raise CommandError(
            "No installed app has a module 'agents' with an Agent. Name one: lineshaft_agent MODULE:AGENT.",
            returncode=2,
        )
    return list(found.values())


async def _run(agents: list[Agent], *, until_idle: bool, retries_within_sec: float) -> None:
    url = getattr(settings, "LINESHAFT_URL", None) or dsn_of("default")
    async with Lineshaft(url, token=getattr(settings, "LINESHAFT_TOKEN", None)) as shaft:
        await run_agents(
            agents, shaft, until_idle=until_idle, retries_within_sec=retries_within_sec, optimize=True
        )


def _keep_connections_fresh(agent: Agent) -> None:
    """Close Django's connections around each handler as around a request: broken and too old ones."""
    handlers = agent._handlers  # noqa: SLF001 - of this package
    for name, handler in handlers.items():
        wrap = _asynchronous if handler.is_async else _synchronous
        handlers[name] = replace(handler, function=wrap(handler.function))


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return call


def _asynchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    close = sync_to_async(close_old_connections)

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        await close()
        try:
            return await function(*args, **kwargs)
        finally:
            await close()

    return call
