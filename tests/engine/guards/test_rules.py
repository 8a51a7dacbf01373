"""What the operator has decided: read from the settings, and from a YAML file that may be broken."""

import logging
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import pytest

from lineshaft.clock import MovableClock
from lineshaft.engine.engine import Engine
from lineshaft.engine.guards.breakers import DEFAULT_POLICY
from lineshaft.engine.guards.rules import Rules, read_breakers
from lineshaft.errors import InvalidInputError
from lineshaft.model.breaker import BreakerConfig
from lineshaft.model.tasks import NewTask
from lineshaft.settings import Settings
from lineshaft.types import Submitted
from lineshaft.types.work import Failure
from tests.world import Actions, ref

#: As the document has it.
DOCUMENT = """\
# .loki/config/circuit-breakers.yaml
defaults:
  failureThreshold: 5
  cooldownSeconds: 300
  halfOpenAfter: 60

overrides:
  ops-security:
    failureThreshold: 3  # More sensitive for security
  biz-marketing:
    failureThreshold: 10  # More tolerant for non-critical
"""


def test_the_documents_file_is_valid_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R-182: overrides merge over the defaults."""
    path = tmp_path / "circuit-breakers.yaml"
    path.write_text(DOCUMENT)

    policy = Rules.of(Settings(circuit_breakers=path)).breakers

    assert policy is not None
    assert policy.config_for("anything") == BreakerConfig()
    assert policy.config_for("ops-security") == BreakerConfig(failure_threshold=3)
    assert policy.config_for("biz-marketing") == BreakerConfig(failure_threshold=10)
    assert caplog.records == []


@pytest.mark.parametrize(
    "content",
    [
        b"defaults: [",
        b"defaults: 7",
        b"\xff\xfe\x00bad",
        b"- a list",
        b"defaults:\n\tfailureThreshold: 3",
        b"defaults: {failureThreshold: -1}",
        b"&a [*a]",
        b"!!python/object/apply:os.system ['true']",
        pytest.param(b"[" * 5000, id="5,000 brackets"),
        None,
    ],
)
def test_a_malformed_file_means_defaults_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    """R-182."""
    path = tmp_path / "circuit-breakers.yaml"
    if content is not None:
        path.write_bytes(content)

    policy = read_breakers(path)

    assert policy in (None, DEFAULT_POLICY), "what can't be read leaves the thresholds as they are"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


def test_an_empty_file_is_no_mistake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "circuit-breakers.yaml"
    path.touch()

    assert read_breakers(path) == DEFAULT_POLICY
    assert caplog.records == []


def test_money_rules() -> None:
    assert Rules.of(Settings()) == Rules()
    given = Settings.load(
        {
            "LINESHAFT_DAILY_BUDGET_USD": "10.50",
            "LINESHAFT_COST_VELOCITY_USD": "5",
            "LINESHAFT_COST_VELOCITY_MINUTES": "2.5",
        }
    )

    rules = Rules.of(given)

    assert rules.limits == {
        "daily_budget_usd": Decimal("10.50"),
        "velocity_usd": Decimal(5),
        "velocity_window_sec": 150,
    }


async def test_the_default_time_limit_is_a_setting(dsn: str) -> None:
    """R-016, U11: for every preset but officeplane."""
    settings = Settings.load({"LINESHAFT_DEFAULT_MAX_DURATION_SEC": "120.5"})
    tasks = [NewTask("t", preset=preset) for preset in (None, "loki", "officeplane")]
    async with Engine(dsn, rules=Rules.of(settings)) as engine:
        single = await engine.submission.submit(tasks)
        many = await engine.submission.submit([NewTask("t") for _ in range(60)])
        dag = await engine.submission.submit_dag(
            "d", [NewTask("t", key="a"), NewTask("t", max_duration_sec=9)]
        )
        found = await _limits(engine, [*single, many[-1], *dag.tasks.values()])

    assert found == [120.5, 120.5, 300, 120.5, 120.5, 9]


async def _limits(engine: Engine, submitted: Iterable[Submitted]) -> list[float | None]:
    return [(await engine.read.task(each.id)).max_duration_sec for each in submitted]


async def test_the_size_limit_of_a_dag_is_a_setting(dsn: str) -> None:
    """R-142: counted with children; standalone tasks have their own limit."""
    settings = Settings.load({"LINESHAFT_MAX_DAG_TASKS": "3"})
    async with Engine(dsn, rules=Rules.of(settings)) as engine:
        await engine.submission.submit_dag("three", [NewTask("t")] * 3)
        await engine.submission.submit([NewTask("t")] * 4)
        for tasks in ([NewTask("t")] * 4, [NewTask("t"), NewTask("batch", children=[NewTask("t")] * 2)]):
            with pytest.raises(InvalidInputError, match=r"at most 3 .* has 4.*LINESHAFT_MAX_DAG_TASKS"):
                await engine.submission.submit_dag("four", tasks)


async def test_the_longest_retry_after_is_a_setting(dsn: str, clock: MovableClock) -> None:
    """R-216: shorter, or longer than the hour that it is by default."""
    for limit, wait in (("30", 30), ("7200", 5000)):
        settings = Settings.load({"LINESHAFT_MAX_RETRY_AFTER_SEC": limit})
        async with Engine(dsn, rules=Rules.of(settings), clock=clock) as engine:
            act = Actions(engine)
            task_id = await act.one("limited", spec={"limit": limit})
            task = await act.take(types=["limited"])
            await engine.work.fail([Failure(ref(task), "slow down", "rate_limit", 5000)])
            found = await engine.read.task(task_id)
            assert found.retry_at is not None
            assert (found.retry_at - clock.now()).total_seconds() == wait
            await engine.cancel.cancel(task_id, "enough")
            # The others slow down for half of it.
            clock.advance(wait)
