"""The operator's settings for guards: thresholds of breakers, limits on spending and on time."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from lineshaft.engine.submit.lanes import MAX_LANES
from lineshaft.model.breaker import BreakerPolicy, document_of, policy_from_document
from lineshaft.model.ratelimit import LONGEST_RETRY_AFTER_SEC
from lineshaft.model.retry import DEFAULT_MAX_DURATION_SEC
from lineshaft.model.tasks import MAX_DAG_TASKS, MAX_SPAWN_DEPTH, MAX_SPAWNED_TASKS
from lineshaft.settings import Settings

_log = logging.getLogger("lineshaft.guards")


class Rules(Struct, frozen=True):
    #: The thresholds in the file of the settings; None: there is no file, or it can't be read.
    breakers: BreakerPolicy | None = None
    #: Limits of the installation that the settings name (engine/guards/limits.py).
    limits: Mapping[str, Any] = field(default_factory=dict)
    #: The time limit of an attempt where neither the task nor its preset has one.
    max_duration_sec: float = DEFAULT_MAX_DURATION_SEC
    #: The longest wait that a provider may ask for.
    max_retry_after_sec: float = LONGEST_RETRY_AFTER_SEC
    #: Tasks that a DAG may be created with.
    max_dag_tasks: int = MAX_DAG_TASKS
    #: Levels of spawned tasks, and spawned tasks of a DAG.
    max_spawn_depth: int = MAX_SPAWN_DEPTH
    max_spawned_tasks: int = MAX_SPAWNED_TASKS
    #: Lanes with claimable tasks.
    max_lanes: int = MAX_LANES

    @property
    def installation_limits(self) -> dict[str, Any]:
        """What becomes a limit of the installation, unless it has one (engine/guards/limits.py)."""
        if self.breakers is None:
            return dict(self.limits)
        return {**self.limits, "breakers": msgspec.json.encode(document_of(self.breakers))}

    @classmethod
    def of(cls, settings: Settings) -> "Rules":
        limits = {
            "daily_budget_usd": settings.daily_budget_usd,
            "velocity_usd": settings.cost_velocity_usd,
            "default_max_cost_usd": settings.default_max_cost_usd,
            "crash_cost_fraction": settings.crash_cost_fraction,
            "judge_max_cost_usd": settings.judge_max_cost_usd,
            "velocity_action": settings.cost_velocity_action,
        }
        if settings.cost_velocity_usd is not None:
            limits["velocity_window_sec"] = settings.cost_velocity_minutes * 60
        breakers = read_breakers(settings.circuit_breakers) if settings.circuit_breakers else None
        given = {name: value for name, value in limits.items() if value is not None}
        return cls(
            breakers,
            given,
            settings.default_max_duration_sec,
            settings.max_retry_after_sec,
            settings.max_dag_tasks,
            settings.max_spawn_depth,
            settings.max_spawned_tasks,
            settings.max_lanes,
        )


def read_breakers(path: Path) -> BreakerPolicy | None:
    """The thresholds in a circuit-breakers file; for invalid ones the defaults, with one warning.

    A file that can't be read says nothing: the thresholds of the installation stay as they are.
    """
    policy, fault = _read_breakers(path)
    if fault is not None:
        _log.warning("%s", fault)
    return policy


def breaker_faults(path: Path) -> str | None:
    """What is wrong with a circuit-breakers file."""
    return _read_breakers(path)[1]


def _read_breakers(path: Path) -> tuple[BreakerPolicy | None, str | None]:
    try:
        document = msgspec.yaml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        fault = f"{path} can't be read, circuit breakers stay as they are: {_short(error)}"
        return None, fault
    policy, faults = policy_from_document(document)
    return policy, f"{path}: {'; '.join(faults)}" if faults else None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
