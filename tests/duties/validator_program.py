"""A validator in its own process, for tests that kill it.

`python -m tests.duties.validator_program DSN COMMAND…`
"""

import asyncio
import sys

from lineshaft.checks.command import Command
from lineshaft.checks.registry import Checks
from lineshaft.duties.validator import Validator
from lineshaft.engine.engine import Engine


async def main(dsn: str, *argv: str) -> None:
    checks = Checks(commands={"test": Command(argv)})
    async with Engine(dsn, checks=checks, max_connections=2) as engine:
        await Validator(engine.gates, engine.approvals).run_once()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
