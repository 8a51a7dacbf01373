"""Limits and defaults of docs/configuration.md that no setting changes, from the constants of the source."""

import inspect
from dataclasses import asdict
from typing import Any

from lineshaft import Agent, Lineshaft
from lineshaft.agent import outcome, steps
from lineshaft.agent.exec import command, files, messages
from lineshaft.checks import decision_report, json_schema, registry
from lineshaft.checks.command import DEFAULT_LIMIT_SEC
from lineshaft.client import large_data
from lineshaft.engine import agents as engine_agents
from lineshaft.engine.artifacts import artifacts
from lineshaft.engine.review import dead_letters
from lineshaft.engine.submit import drafts
from lineshaft.model import fields, parts, priority, ratelimit, reviews, tasks
from lineshaft.model.presets import FACTORY
from lineshaft.server.framework import limits as server_limits
from lineshaft.server.framework import streams
from lineshaft.types import RetryPolicy, data_refs, page, protocol, review, work

_STANDARD = FACTORY


def size(number: int) -> str:
    for unit, bits in (("MiB", 20), ("KiB", 10)):
        if number >= 1 << bits and not number % (1 << bits):
            return f"{number >> bits} {unit}"
    return f"{number:,} bytes"


def seconds(number: float) -> str:
    if number >= 365 * 86_400:
        return f"{number / 86_400:.0f} days"
    return f"{number:g} s"


LIMITS: dict[str, list[tuple[str, str]]] = {
    "Tasks": [
        ("`spec`, `surface` and each schema, as JSON", size(fields.MAX_SPEC_BYTES)),
        ("a text: `type`, `title`, `key`, a tag and so on", f"{fields.MAX_TEXT:,} characters"),
        ("`tags`, `inputs`, `required_capabilities` and other lists", f"{fields.MAX_LIST:,} entries"),
        ("`depends_on`", f"{fields.MAX_DEPENDENCIES:,} tasks"),
        ("`id`", "128 characters"),
        ("`priority`", "0 (first) to 100 (last)"),
        ("`max_attempts`", f"{fields.MAX_ATTEMPTS:,}"),
        ("durations", f"{seconds(fields.MIN_SECONDS)} to {seconds(fields.LONGEST_SECONDS)}"),
        ("gates of a task", str(registry.MAX_GATES)),
        ("a JSON schema of a gate", size(json_schema.MAX_BYTES)),
        ("tasks of one call, including children", f"{drafts.MAX_BATCH:,}"),
        ("levels of children in a submission", str(tasks.MAX_CHILD_DEPTH)),
        ("items of a `for_each`", f"{parts.MAX_ITEMS:,}"),
    ],
    "Attempts": [
        ("an output, a checkpoint, the result of a step, as JSON", size(outcome.MAX_OUTPUT_BYTES)),
        ("the inputs of a task together, as they are stored", size(work.MAX_INPUT_BYTES)),
        ("`ctx.progress`, as JSON", size(work.MAX_PROGRESS_BYTES)),
        ("the name of a step", f"{steps.MAX_NAME} characters"),
        ("an error; more is cut off", f"{work.MAX_ERROR:,} characters"),
        ("a traceback; the end is kept", size(work.MAX_TRACEBACK_BYTES)),
        ("a decision report, as JSON", size(decision_report.MAX_BYTES)),
        ("`ctx.spend` of one attempt", f"{work.MOST_COST:,} USD"),
        ("rate limits of a task in a row before it counts as failed", str(ratelimit.MAX_WAITS)),
        ("standard output of a command", size(command.MAX_OUTPUT_BYTES)),
        ("a line to `$LINESHAFT_FD`", size(messages.MAX_LINE_BYTES)),
        ("slots of an agent", f"{engine_agents.MAX_SLOTS:,}"),
    ],
    "Artifacts": [
        ("files that a command leaves in `$LINESHAFT_OUTPUTS`", f"{files.MAX_FILES:,}"),
        ("data of an output above which it is an artifact", size(data_refs.MAX_INLINE_BYTES)),
        ("large data that gates check and `?full=1` returns", size(artifacts.MAX_DATA_BYTES)),
        ("how long an attempt waits for a store that is away", seconds(large_data.PATIENCE_SEC)),
    ],
    "Calls": [
        ("nesting of a request body", f"{server_limits.MAX_DEPTH} levels"),
        ("values in a request body", f"{server_limits.MAX_VALUES:,}"),
        ("items of a call of the work protocol", f"{protocol.MAX_ITEMS:,}"),
        ("`wait_sec` of a claim", seconds(protocol.MAX_WAIT_SEC)),
        ("a page of a list", f"{page.MAX_LIMIT} entries, {page.DEFAULT_LIMIT} by default"),
        ("dead letters resolved by one call", f"{dead_letters.MAX_BULK:,}"),
        ("a note about an approval", f"{review.MAX_NOTE:,} characters"),
        ("a note about a dead letter", f"{reviews.MAX_NOTE:,} characters"),
        ("event streams of a server", f"{streams.MAX_STREAMS}"),
        ("… of one token", f"{streams.MAX_STREAMS_PER_TOKEN}"),
    ],
}


def defaults() -> dict[str, list[tuple[str, str]]]:
    policy = asdict(RetryPolicy().effective)
    return {
        "Tasks": [
            ("`priority`", str(priority.DEFAULT_PRIORITY)),
            ("`priority_boost_per_minute`", str(_STANDARD.boost_per_minute)),
            ("`max_attempts`", str(_STANDARD.max_attempts)),
            ("`max_cost_usd`, `max_total_cost_usd`", "no limit"),
            *((f"`retry.{name}`", shown(value)) for name, value in policy.items()),
            ("the time limit of a command gate", seconds(DEFAULT_LIMIT_SEC)),
        ],
        "Agents": [
            (f"`{name}`", shown(value))
            for name, value in parameters(Agent.__init__).items()
            if isinstance(value, int | float)
        ],
        "Clients": [("`max_connections`", shown(parameters(Lineshaft.__init__)["max_connections"]))],
    }


def parameters(function: Any) -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def shown(value: Any) -> str:
    if isinstance(value, list | tuple | frozenset | set):
        return ", ".join(f"`{item}`" for item in value) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def tables() -> str:
    parts = [
        "## Limits\n",
        "These are fixed. A request beyond a limit is refused with an error that names it.\n",
    ]
    parts += [_table(name, rows) for name, rows in LIMITS.items()]
    parts += [
        "## Defaults\n",
        "These hold where a task, an agent or a client leaves a value out that no setting above has.\n",
    ]
    parts += [_table(f"{name} by default", rows) for name, rows in defaults().items()]
    return "\n".join(parts)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {what} | {value} |\n" for what, value in rows]
    return f"### {title}\n\n| what | value |\n|---|---|\n{''.join(lines)}"
