"""What the benchmarks share: a server with production durability, fair turns, and the table at the end."""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lineshaft.embedded import EmbeddedServer
from lineshaft.engine.postgres import migrate

#: As an operator would set them here. Durability is PostgreSQL's default: every commit is on disk.
SERVER_OPTIONS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "max_connections": "50"}


@contextmanager
def server() -> Iterator[EmbeddedServer]:
    # On a terminal, agents would print a line for each task.
    os.environ.setdefault("LINESHAFT_LOG_LEVEL", "warning")
    with (
        tempfile.TemporaryDirectory(prefix="lineshaft-bench-") as home,
        EmbeddedServer.start(Path(home) / "home", options=SERVER_OPTIONS) as started,
    ):
        yield started


def fresh_database(running: EmbeddedServer, name: str) -> str:
    """An empty, migrated database."""
    with psycopg.connect(running.dsn, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
        admin.execute(f"CREATE DATABASE {name}".encode())
    dsn = make_conninfo(running.dsn, dbname=name)
    migrate.up(dsn)
    return dsn


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


async def seconds_async(work: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


@dataclass(slots=True)
class Report:
    """Figures of one run, each with the goal it is held against."""

    title: str
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)

    def ratio(self, name: str, subject: float, reference: float, goal: str, *, unit: str) -> None:
        """`subject` and `reference` are rates or times in the same unit."""
        value = subject / reference
        self.figures[name] = round(value, 4)
        self.rows.append((name, f"{subject:,.4g} {unit}", f"{reference:,.4g} {unit}", f"{value:.2f}", goal))

    def figure(self, name: str, value: float, unit: str, goal: str = "") -> None:
        self.figures[name] = round(value, 4)
        self.rows.append((name, f"{value:,.4g} {unit}", "", "", goal))

    def show(self, json_file: Path | None) -> None:
        table = Table("figure", "Lineshaft", "reference", "ratio", "goal", title=self.title)
        for row in self.rows:
            table.add_row(*row)
        Console(width=110).print(table)
        if json_file is not None:
            json_file.write_text(json.dumps(self.figures, indent=2) + "\n", encoding="utf-8")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Call it with what comes next."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        line = bar.add_task("starting", total=total)

        def step(what: str) -> None:
            bar.update(line, description=what, advance=1)

        yield step


async def alternate(
    subject: Callable[[], Awaitable[float]], reference: Callable[[], Awaitable[float]], times: int = 5
) -> tuple[float, float]:
    """Medians of both, measured in turns, so that a slow minute of the machine hits both alike."""
    subjects, references = [], []
    for _ in range(times):
        references.append(await reference())
        subjects.append(await subject())
        await asyncio.sleep(0)
    return statistics.median(subjects), statistics.median(references)
