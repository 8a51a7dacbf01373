"""The figures of one run, with what one has to know to read them."""

import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psycopg

from benchmarks.peers.environments import ROOT, version_of
from benchmarks.peers.stage import Stage
from benchmarks.peers.subjects import Subject


@dataclass(slots=True)
class Results:
    about: dict[str, str]
    #: By subject and figure: the value of each turn.
    runs: dict[str, dict[str, list[float]]]
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, chosen: list[Subject], *, quick: bool, turns: int) -> Self:
        about = {
            "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": _commit(),
            "size": "quick: to see that it works, not to be believed" if quick else "full",
            "turns": str(turns),
            "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}",
            "python": platform.python_version(),
            "load before": f"{os.getloadavg()[0]:.1f}",
        }
        about |= {subject.name: version_of(subject.name) for subject in chosen if subject.peer}
        return cls(about, {subject.name: {} for subject in chosen})

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def tell_server(self, stage: Stage) -> None:
        with psycopg.connect(stage.postgres.dsn) as connection:
            asked = ["server_version", "synchronous_commit", "fsync", "shared_buffers"]
            for name in asked:
                ((value,),) = connection.execute("SELECT current_setting(%s)", [name]).fetchall()
                self.about[f"postgresql {name}"] = value
        self.about["redis"] = "appendonly, everysec" if stage.redis else "not installed"

    def add(self, subject: Subject, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.runs[subject.name].setdefault(name, []).append(round(value, 4))

    def failed(self, what: str, why: str) -> None:
        # Results are kept with the project, which has no business with where it lay.
        self.failures[what] = why.strip().replace(str(ROOT), ".").replace(str(Path.home()), "~")

    def median(self, subject: str, figure: str) -> float | None:
        found = self.runs.get(subject, {}).get(figure)
        return statistics.median(found) if found else None

    def write(self, path: Path) -> None:
        # Whether the machine was quiet: the measurement alone makes it about two.
        self.about["load after"] = f"{os.getloadavg()[0]:.1f}"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.stdout.strip() or "unknown"
