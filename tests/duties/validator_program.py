"""A validator in its own process, for tests that kill it.

`python -m tests.duties.validator_program DSN COMMAND…`, or `DSN URL` with the URL of a judge.
"""

import asyncio
import sys

from lineshaft.checks.command import CheckCommand
from lineshaft.checks.llm_judge import LLMJudge
from lineshaft.checks.registry import Checks
from lineshaft.duties.validator import Validator
from lineshaft.engine.engine import Engine
from lineshaft.integrations.llm.configuration import LLMConfig


async def main(dsn: str, *argv: str) -> None:
    if argv[0].startswith("http"):
        checks = Checks(judge=LLMJudge(LLMConfig(model="m", url=argv[0])))
    else:
        checks = Checks(commands={"test": CheckCommand(argv)})
    async with Engine(dsn, checks=checks, max_connections=2) as engine:
        await Validator(engine.gates, engine.approvals).run_once()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
