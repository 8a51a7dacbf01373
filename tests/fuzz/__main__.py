"""`make fuzz`: the requests of schemathesis, then our own, to a real server with an embedded database."""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

import schemathesis
from schemathesis.core.result import Ok

from tests.fuzz.run import Outcome, fuzz, tokens_of_all_scopes
from tests.hostile.conftest import Target, running_server
from tests.server.client import Client
from tests.server.test_whatever_is_sent import call_it, populate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="our own requests (default: 100000)")
    parser.add_argument("--seed", type=int, help="of our own requests (default: a new one)")
    parser.add_argument(
        "--examples", type=int, default=20, help="schemathesis's requests for each operation (default: 20)"
    )
    return parser.parse_args()


def call_by_document(target: Target, token: str, examples: int) -> int:
    """Schemathesis: no 500, and no response that the document doesn't describe."""
    url = f"http://127.0.0.1:{target.port}"
    headers = {"Authorization": f"Bearer {token}"}
    names = asyncio.run(populate(Client(target.port, token)))
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    called = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        call_it(found.ok(), url, names, examples=examples, headers=headers)
        called += 1
    return called


async def call_at_random(target: Target, tokens: dict[str, str | None], requests: int, seed: int) -> Outcome:
    before, outcome, longest_sec = target.memory, Outcome(), 0.0
    try:
        async with target.unharmed() as watch:
            await fuzz(target, tokens, requests=requests, seed=seed, outcome=outcome)
            longest_sec = watch.worst_sec
    except AssertionError as error:
        outcome.faults.append(str(error))
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(outcome.statuses.items()))
    print(
        f"{sum(outcome.statuses.values())} requests to {len(outcome.operations)} operations in "
        f"{outcome.seconds:.0f} s ({statuses}); longest /healthz {longest_sec:.2f} s, memory "
        f"{before >> 20} MB → {target.memory >> 20} MB, at most {target.peak_memory >> 20} MB"
    )
    return outcome


def main() -> int:
    args = arguments()
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    with (
        tempfile.TemporaryDirectory(prefix="lineshaft-fuzz-") as folder,
        running_server(None, Path(folder), (), None, {"LINESHAFT_LOG_FORMAT": "json"}) as target,
    ):
        tokens = asyncio.run(tokens_of_all_scopes(target.client))
        token = tokens["admin"]
        assert token is not None
        called = call_by_document(target, token, args.examples)
        print(f"schemathesis: {called} operations, {2 * args.examples} requests each: as documented")
        print(f"seed {seed}: {args.requests} random requests", flush=True)
        outcome = asyncio.run(call_at_random(target, tokens, args.requests, seed))
        errors = [line for line in target.log.read_text().splitlines() if '"level": "error"' in line]
    for fault in outcome.faults:
        print(f"FAULT {fault}")
    for line in errors[:20]:
        print(f"LOGGED {line[:500]} … {line[-1500:]}")
    return 1 if outcome.faults or errors else 0


if __name__ == "__main__":
    sys.exit(main())
