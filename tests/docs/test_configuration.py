"""docs/configuration.md, generated from the source by `python -m tests.docs.test_configuration`."""

from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from lineshaft.settings import Settings
from tests.docs import limits

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration and limits

This page is generated from the source.

## Settings

Settings come from the environment, or from `lineshaft.toml` in the working directory (or the file that
`LINESHAFT_CONFIG` names), where they have the same names in lower case without the prefix. The environment
takes precedence. Unknown settings and invalid values are errors; all of them are reported at once.
Durations may be fractions of a second.
"""
#: Each setting has a place in one of these tables.
TABLES = {
    "Database": ("database_url", "pooler", "home"),
    "Clients": ("url", "token"),
    "Server": (
        *(
            "host",
            "port",
            "auth",
            "allowed_hosts",
            "allowed_origins",
            "max_body_bytes",
            "read_timeout_sec",
            "max_retries_are",
        ),
        *("reaper_interval_sec", "promoter_interval_sec"),
    ),
    "Logs": ("log_format", "log_level"),
    "Tasks and DAGs": (
        *("default_max_duration_sec", "max_dag_tasks", "max_spawn_depth", "max_spawned_tasks"),
        *("max_lanes", "max_retry_after_sec"),
    ),
    "Money": (
        *("daily_budget_usd", "cost_velocity_usd", "cost_velocity_minutes", "cost_velocity_action"),
        *("default_max_cost_usd", "crash_cost_fraction", "judge_max_cost_usd"),
    ),
    "Retention": (
        *("keep_tasks_days", "keep_events_days", "keep_agents_days", "keep_firings_days"),
        "keep_artifacts_days",
    ),
    "Artifact store": ("artifacts", "max_artifact_bytes"),
    "Breakers, notifications and sources": (
        *("circuit_breakers", "notifications", "sources", "source_folders", "loki_dir"),
    ),
    "Gates": ("validation_commands", "judge_url", "judge_model", "judge_api_key"),
    "Language models": (
        *("llm_model", "llm_fallback_models", "llm_url", "llm_api_key", "llm_prices", "llm_timeout_sec"),
    ),
    "Redis": ("redis_url", "redis_events"),
    "OfficePlane": (
        *("officeplane_locks", "officeplane_lock_grace_sec", "officeplane_sse", "officeplane_prefix"),
    ),
}


def page() -> str:
    settings = {field.name: field for field in fields(Settings)}
    parts = [HEAD]
    for title, names in TABLES.items():
        rows = "".join(_row(settings[name]) for name in names)
        parts.append(
            f"### {title}\n\n| variable | what it is for | value | default |\n|---|---|---|---|\n{rows}"
        )
    return "\n".join([*parts, limits.tables()])


def _row(field: Field[Any]) -> str:
    default = field.default if field.default is not MISSING else ".lineshaft"
    shown = "" if default in (None, ()) else f"`{default}`"
    rule = field.metadata["rule"].words
    return f"| `LINESHAFT_{field.name.upper()}` | {field.metadata['about']} | {rule} | {shown} |\n"


def test_every_setting_is_in_one_table() -> None:
    assert sorted(name for names in TABLES.values() for name in names) == sorted(
        field.name for field in fields(Settings)
    )


def test_the_page_is_that_of_the_source() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "Run: python -m tests.docs.test_configuration"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
