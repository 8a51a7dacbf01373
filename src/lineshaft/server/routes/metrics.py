"""`/metrics` in Prometheus' text format."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from lineshaft.engine.feed.wakeups import Mode, Wakeups
from lineshaft.engine.metrics import Metrics
from lineshaft.model.states import ENDED
from lineshaft.operations.operation import operation
from lineshaft.server.service import Call
from lineshaft.types import Quota, Scope
from lineshaft.types.request import Nothing

#: A counter's name has to end with _total, and only a summary may have the label quantile. Names of the
#: specification that say otherwise are kept, without a type, beside correct ones.
_WRONG_NAME = "untyped"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[Mapping[str, str], Any]]


@operation("GET /metrics", Scope.READ, response={200: "text/plain"})
async def metrics(call: Call, request: Nothing) -> Response:  # noqa: ARG001 - it has no fields
    """Metrics for Prometheus: of the whole database, but for `wakeup_mode…`, which is of this server."""
    found = await call.service.metrics.read()
    lines = [*_lines(found), *_wakeup_lines(call.service.wakeups)]
    return Response("".join(lines), media_type=MEDIA_TYPE)


def _wakeup_lines(wakeups: Wakeups) -> Iterable[str]:
    yield from _metric(
        "wakeup_mode",
        "gauge",
        "How this server's waiting agents learn of new tasks: 1 for the present way.",
        (({"mode": str(mode)}, int(mode is wakeups.mode)) for mode in Mode),
    )
    yield from _metric(
        "wakeup_mode_since_seconds",
        "gauge",
        "Since when, in seconds since 1970.",
        [({}, wakeups.mode_since.timestamp())],
    )


def _lines(found: Metrics) -> Iterable[str]:
    totals, agents = found.totals, found.agents
    live = [depth for depth in found.stats.depth if depth.status not in ENDED]
    yield from _metric(
        "task_queue_depth",
        "gauge",
        "Tasks that have not ended, by state and tier; an estimate once there are very many.",
        (({"status": d.status.lower(), "priority_tier": str(d.tier or "")}, d.count) for d in live),
    )
    waited = "From READY to the first start, of the 1000 tasks that ended last."
    quantiles = ((str(int(name[1:]) / 100), value) for name, value in found.waits.items())
    yield from _metric(
        "task_queue_wait_quantiles_seconds",
        "summary",
        waited,
        (({"quantile": quantile}, value) for quantile, value in quantiles),
    )
    yield from _metric(
        "task_queue_wait_seconds",
        _WRONG_NAME,
        f"{waited} Its successor is task_queue_wait_quantiles_seconds.",
        (({"quantile": name}, value) for name, value in found.waits.items()),
    )
    yield from _metric(
        "tasks_completed_total",
        "counter",
        "Tasks that completed.",
        (({"type": name}, value) for name, value in totals.completed.items()),
    )
    yield from _metric(
        "tasks_failed_total",
        "counter",
        "Attempts that failed.",
        (({"reason": name}, value) for name, value in totals.failed.items()),
    )
    yield from _metric(
        "tasks_dead_lettered_total", "counter", "Tasks that failed permanently.", [({}, totals.dead_lettered)]
    )
    yield from _metric(
        "tasks_duplicate_total",
        "counter",
        "Submissions that met a known idempotency key and created nothing.",
        [({}, totals.duplicates)],
    )
    costs = [
        ({"type": type_, "agent": agent, "model": model}, value)
        for (type_, agent, model), value in totals.cost_usd.items()
    ]
    yield from _metric("task_cost_usd_total", "counter", "The cost of attempts.", costs)
    yield from _metric(
        "task_cost_usd", _WRONG_NAME, "The cost of attempts. Its successor is task_cost_usd_total.", costs
    )
    yield from _metric(
        "daily_spend_usd", "gauge", "Spent since midnight UTC.", [({}, found.stats.spend_today_usd)]
    )
    stored = found.stats.artifacts
    yield from _metric(
        "artifact_store_bytes",
        "gauge",
        "The size of all artifacts, equal contents once; an estimate once there are very many.",
        [({}, stored.bytes)],
    )
    yield from _metric(
        "artifact_store_contents",
        "gauge",
        "Different contents in the artifact store.",
        [({}, stored.contents)],
    )
    yield from _metric(
        "budget_remaining_usd",
        "gauge",
        "What an agent can still spend; only agents with a budget.",
        (
            ({"agent": agent.id}, agent.budget_remaining_usd)
            for agent in agents
            if agent.budget_remaining_usd is not None
        ),
    )
    yield from _metric(
        "agent_utilization",
        "gauge",
        "The share of time in which an agent's processes executed tasks, 0 to 1.",
        (({"agent_id": agent.id}, found.utilization.get(agent.id, 0.0)) for agent in agents),
    )
    yield from _metric(
        "agent_heartbeat_misses_total",
        "counter",
        "Tasks taken back because heartbeats were missing.",
        (({"agent_id": agent.id}, totals.heartbeats_missed[agent.id]) for agent in agents),
    )
    rates = ((agent.id, totals.success_rate(agent.id)) for agent in agents)
    yield from _metric(
        "agent_claim_success_rate",
        "gauge",
        "Of an agent's claims that completed or failed, the share that completed, 0 to 1.",
        (({"agent_id": name}, rate) for name, rate in rates if rate is not None),
    )
    yield from _metric(
        "source_firings_total",
        "counter",
        "What became of the events of sources.",
        (({"source": name, "outcome": outcome}, number) for name, outcome, number in found.firings),
    )
    yield from _metric(
        "source_lag_seconds",
        "gauge",
        "How late the oldest due tick of a schedule is.",
        [({}, found.source_lag_sec)],
    )
    yield from _quota_lines(found.quotas)
    yield from _metric(
        "totals_age_seconds",
        "gauge",
        "How long ago the oldest event happened that totals lack: they are counted late where the database "
        "accepts no writes.",
        [({}, found.totals_age_sec)],
    )


def _quota_lines(quotas: Sequence[Quota]) -> Iterable[str]:
    rates = [(quota, quota.rate) for quota in quotas if quota.rate is not None]
    figures: dict[str, tuple[str, Samples]] = {
        "quota_running_tasks": (
            "Held tasks that count for a quota, of all its keys.",
            (({"quota": quota.name}, quota.running) for quota in quotas),
        ),
        "quota_max_running_tasks": (
            "How many may run at once; of each key, unless they share the limit.",
            (({"quota": quota.name}, quota.max_running) for quota in quotas if quota.max_running is not None),
        ),
        "quota_waiting_tasks": (
            "READY tasks that wait for a quota, counted up to 10,000.",
            (({"quota": quota.name}, quota.waiting) for quota in quotas),
        ),
        "quota_used": (
            "What was used of a quota's rate within its window, by the key that used most.",
            (({"quota": quota.name, "unit": str(rate.unit)}, quota.used) for quota, rate in rates),
        ),
        "quota_rate_amount": (
            "How much may be used within the window.",
            (({"quota": quota.name, "unit": str(rate.unit)}, rate.amount) for quota, rate in rates),
        ),
    }
    for name, (about, samples) in figures.items():
        yield from _metric(name, "gauge", about, samples)


def _metric(name: str, kind: str, about: str, samples: Samples) -> Iterable[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
