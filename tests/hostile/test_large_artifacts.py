"""Large artifacts pass through the server and the client in pieces: neither holds them in memory."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifact_stores import place
from tests.hostile.conftest import Serving

__all__ = ["place"]

#: A run by hand may use more.
MEBIBYTES = int(os.environ.get("ARTIFACT_MEBIBYTES", "128"))
MAX_GROWTH_BYTES = 50 << 20

_CLIENT = """
import asyncio, hashlib, os, resource, sys
from pathlib import Path
from lineshaft import Lineshaft

async def pieces(count):
    block = os.urandom(1 << 20)
    for n in range(count):
        yield block[n % 997:] + block[:n % 997]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

async def main():
    async with Lineshaft(sys.argv[1]) as shaft:
        small = await shaft.artifacts.put("small", b"x" * (5 << 20))
        await shaft.artifacts.read(small.ref)
        before = peak()
        made = await shaft.artifacts.put("large", pieces(int(sys.argv[2])))
        digest = hashlib.sha256()
        async with shaft.artifacts.open(made.ref) as reader:
            async for chunk in reader:
                digest.update(chunk)
        assert (digest.hexdigest(), made.size) == (made.sha256, int(sys.argv[2]) << 20)
        print(peak() - before)

asyncio.run(main())
"""


@pytest.mark.slow("uploads and downloads 128 MiB, on a folder and on S3")
async def test_a_large_artifact_needs_little_memory(serving: Serving, place: str, tmp_path: Path) -> None:
    with serving(LINESHAFT_ARTIFACTS=place) as target:
        grown = await _transfer(target.port, 6)  # libraries are loaded, pools are full
        before = target.memory
        async with target.unharmed():
            grown = await _transfer(target.port, MEBIBYTES)
        server_growth = target.peak_memory - before

    print(f"{place}: server grew by {server_growth >> 20} MiB, client by {grown >> 20} MiB")  # noqa: T201
    assert grown < MAX_GROWTH_BYTES
    assert server_growth < MAX_GROWTH_BYTES
    assert list(tmp_path.glob("artifacts/temporary/*")) == []  # noqa: ASYNC240 - quick


async def _transfer(port: int, mebibytes: int) -> int:
    """How much the memory of the client grew."""
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _CLIENT, f"http://127.0.0.1:{port}", str(mebibytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout)
