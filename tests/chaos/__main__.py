"""`python -m tests.chaos`: a run by hand, or by `make chaos`."""

import argparse
import asyncio
import random
import sys
from pathlib import Path

import msgspec

from tests.chaos.faults import ABOUT, OF_REDIS, OTHERS, Kind, pgbouncer
from tests.chaos.plan import Plan, impossible
from tests.chaos.report import table
from tests.chaos.run import Run


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> int:
    about = "\n".join(f"  {kind:<18} {text}" for kind, text in ABOUT.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Agents, servers and clients at work while a nemesis breaks things; then the proof that "
        f"nothing was lost or doubled.\n\nfaults:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="the same seed makes the same work and the same faults")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--faults", help="only these, separated by commas")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between faults (2)")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--redis", action="store_true", help="with a Redis, and its faults")
    parser.add_argument("--postgres", type=int, metavar="MAJOR", help="this version (the newest found)")
    parser.add_argument("--attacks", action="store_true", help="hostile clients call the servers, too")
    parser.add_argument(
        "--lossy", action="store_true", help="on a database that forgets: shows that the checker objects"
    )
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="copy histories and logs there")
    parser.add_argument("--show", action="store_true", help="show the schedule of faults and end")
    parser.add_argument("--json", action="store_true", help="give the result as JSON")
    args = parser.parse_args()
    kinds = [Kind(name) for name in args.faults.split(",")] if args.faults else list(OTHERS)
    if args.redis:
        kinds += [kind for kind in OF_REDIS if kind not in kinds]
    missing = impossible(kinds)
    for kind, why in missing.items():
        _log(f"{kind} is left out: it {why}")
    if pgbouncer() is None:
        _log("PgBouncer is left out: it isn't installed (Debian: apt-get install pgbouncer)")
    plan = Plan(
        seed=random.randrange(1_000_000) if args.seed is None else args.seed,
        seconds=args.minutes * 60,
        kinds=[kind for kind in kinds if kind not in missing],
        agents=args.agents,
        faults_every_sec=args.every,
        pgbouncer=pgbouncer(),
        major=args.postgres,
        attacks=args.attacks,
        lossy=args.lossy,
        keep=args.keep,
        log=_log,
    )
    if args.show:
        for fault in plan.faults():
            sys.stdout.write(f"{fault.at:7.2f} s  {fault}\n")
        return 0
    report = asyncio.run(Run(plan).run())
    text = msgspec.json.format(msgspec.json.encode(report)).decode() if args.json else table(report)
    sys.stdout.write(text + "\n")
    return 0 if report.held else 1


if __name__ == "__main__":
    sys.exit(main())
