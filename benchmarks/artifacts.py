"""`make bench-artifacts`: artifacts up and down, beside a bare copy of a file and bare calls of S3.

Each is measured in turns with its reference, in one run. A bare copy writes a file in pieces of 1 MiB and
synchronizes it to disk; bare S3 is one call of obstore. `--mebibytes N` is the size of a large artifact
(128), `--small N` the number of small ones (500). `--json FILE` writes the figures as a flat object.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path

from tests.artifact_stores import ACCESS_KEY, BUCKET, SECRET_KEY, s3_server

from benchmarks.common import Report, alternate, fresh_database, progress, seconds_async, server
from lineshaft.artifacts import open_store
from lineshaft.artifacts.s3 import S3Store
from lineshaft.artifacts.store import Store
from lineshaft.engine.engine import Engine
from lineshaft.settings import Settings
from lineshaft.types import Artifact

PIECE = 1 << 20
SMALL_BYTES = 4096
AT_ONCE = 8


class Data:
    """Bytes that are different each time, so that nothing is stored before."""

    def __init__(self, mebibytes: int) -> None:
        self._mebibytes = mebibytes
        self._numbers = count()
        self._block = os.urandom(PIECE)

    async def pieces(self) -> AsyncIterator[bytes]:
        first = next(self._numbers).to_bytes(16, "big")
        for n in range(self._mebibytes):
            yield (first + n.to_bytes(16, "big") + self._block)[:PIECE]

    def small(self) -> bytes:
        return (next(self._numbers).to_bytes(16, "big") + self._block)[:SMALL_BYTES]


async def copy_bare(folder: Path, data: Data) -> None:
    # A new file each time, as ours is: to overwrite one is cheaper.
    file, _ = tempfile.mkstemp(dir=folder)
    try:
        async for piece in data.pieces():
            await asyncio.to_thread(os.write, file, piece)
        await asyncio.to_thread(os.fsync, file)
    finally:
        os.close(file)


async def put_bare(store: S3Store, key: str, data: Data) -> None:
    await store.write(key, data.pieces())


async def read_all(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass


async def in_turns(work: Callable[[], Awaitable[object]], times: int) -> None:
    """So many calls, a few at the same time."""
    left = iter(range(times))

    async def worker() -> None:
        for _ in left:
            await work()

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


async def measure(  # noqa: PLR0917 - called twice
    name: str,
    dsn: str,
    store: Store,
    bare_put: Callable[[Data], Awaitable[object]],
    bare_small: Callable[[Data], Awaitable[object]],
    args: argparse.Namespace,
    report: Report,
    step: Callable[[str], None],
) -> None:
    data, size = Data(args.mebibytes), args.mebibytes
    made: list[Artifact] = []
    async with Engine(dsn, store=store, max_connections=AT_ONCE) as engine:

        async def put() -> None:
            made.append(await engine.artifacts.put(data.pieces(), name="large"))

        async def put_small() -> None:
            async def one() -> AsyncIterator[bytes]:
                yield data.small()

            await engine.artifacts.put(one(), name="small")

        async def rate(work: Callable[[], Awaitable[object]], amount: float) -> float:
            return amount / await seconds_async(work)

        step(f"{name}: large uploads")
        ours, bare = await alternate(
            lambda: rate(put, size), lambda: rate(lambda: bare_put(data), size), args.times
        )
        report.ratio(f"{name}_put_ratio", ours, bare, "", unit="MiB/s")
        step(f"{name}: large downloads")
        ours = await rate(lambda: read_all(engine.artifacts.read(made[-1])), size)
        report.figure(f"{name}_get_mib_per_sec", ours, "MiB/s")
        step(f"{name}: small uploads")
        ours, bare = await alternate(
            lambda: rate(lambda: in_turns(put_small, args.small), args.small),
            lambda: rate(lambda: in_turns(lambda: bare_small(data), args.small), args.small),
            args.times,
        )
        report.ratio(f"{name}_small_ratio", ours, bare, "", unit="artifacts/s")


async def run(args: argparse.Namespace, report: Report) -> None:
    with (
        server() as running,
        tempfile.TemporaryDirectory(prefix="lineshaft-bench-") as home,
        progress(7) as step,
    ):
        folder = Path(home)
        numbers = count()

        async def small_file(data: Data) -> None:
            path = folder / f"small{next(numbers)}"

            def write() -> None:
                file = os.open(path, os.O_WRONLY | os.O_CREAT)
                os.write(file, data.small())
                os.fsync(file)
                os.close(file)

            await asyncio.to_thread(write)

        store = open_store(Settings(artifacts=str(folder / "artifacts")))
        dsn = fresh_database(running, "artifacts_folder")
        await measure(
            "folder", dsn, store, lambda data: copy_bare(folder, data), small_file, args, report, step
        )
        (folder / "s3").mkdir()
        with s3_server(folder / "s3") as url:
            variables = {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            }
            bare = S3Store(BUCKET, "bare", variables)
            await measure(
                "s3",
                fresh_database(running, "artifacts_s3"),
                S3Store(BUCKET, "ours", variables),
                lambda data: put_bare(bare, f"large{next(numbers)}", data),
                lambda data: bare.create(f"small{next(numbers)}", data.small()),
                args,
                report,
                step,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--mebibytes", type=int, default=128, metavar="N")
    parser.add_argument("--small", type=int, default=500, metavar="N")
    parser.add_argument("--times", type=int, default=3, metavar="N")
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    args = parser.parse_args()
    if args.quick:
        args.mebibytes, args.small, args.times = 4, 10, 1
    report = Report("Artifacts beside a bare copy, and beside bare calls of S3")
    asyncio.run(run(args, report))
    report.show(args.json)


if __name__ == "__main__":
    main()
