"""New tasks: all faults are reported at once, and the row is complete."""

import json
import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.model.fields import MAX_DEPENDENCIES, MAX_LIST, MAX_SPEC_BYTES, MAX_TEXT
from lineshaft.model.presets import preset_names
from lineshaft.model.priority import Lane
from lineshaft.model.resolving import Resolver
from lineshaft.model.retry import FailureCategory, Strategy, retry_delay
from lineshaft.model.tasks import Gate, NewTask, OutputContract, RetrySpec, policy, resolve

NOON = datetime(2026, 2, 8, 12, tzinfo=UTC)


def faults(task: NewTask, **options: Any) -> dict[str, str]:
    with pytest.raises(InvalidInputError) as caught:
        resolve(task, **options)
    return dict(caught.value.errors)


# Defaults and presets.


def test_only_the_type_is_required() -> None:
    """R-004, R-009, R-019: everything else has a default."""
    row = resolve(NewTask("eng-backend"))

    assert (row.type, row.title, row.spec, row.preset) == ("eng-backend", "eng-backend", b"{}", "factory")
    assert (row.priority, row.priority_boost_per_minute, row.max_attempts) == (50, 0.1, 3)
    assert (row.max_duration_sec, row.require_decision_report) == (3600.0, False)
    assert (row.retry, row.gates, row.deadline, row.run_at) == (None, None, None, None)
    assert (row.required_capabilities, row.tags, row.context_tasks) == ((), (), ())


@pytest.mark.parametrize(
    ("preset", "limits", "report", "first_delay"),
    [
        ("factory", (0.1, 3, 3_600.0), False, 10.0),
        ("loki", (0.0, 3, 3_600.0), True, 60.0),
        ("officeplane", (0.0, 4, 300.0), False, 5.0),
    ],
)
def test_presets(preset: str, limits: tuple[float, int, float], report: bool, first_delay: float) -> None:
    """U2, U3, U11, U15, R-093, R-165: each preset has its defaults; explicit fields win."""
    row = resolve(NewTask("x", preset=preset))
    assert (row.priority_boost_per_minute, row.max_attempts, row.max_duration_sec) == limits
    assert row.require_decision_report is report
    assert policy(None, row.preset).initial_delay_sec == first_delay

    own = resolve(
        NewTask(
            "x",
            preset=preset,
            priority_boost_per_minute=2,
            max_attempts=7,
            max_duration_sec=1,
            output=OutputContract(require_decision_report=not report),
        )
    )
    assert (own.priority_boost_per_minute, own.max_attempts, own.max_duration_sec) == (2.0, 7, 1.0)
    assert own.require_decision_report is not report


@pytest.mark.parametrize(
    ("spec", "title"),
    [
        ({"goal": " Ship it ", "action": "build"}, "Ship it"),
        ({"action": "build"}, "build"),
        ({"goal": " ", "action": 7}, "code"),
        ({"goal": "g" * 2_000}, "g" * MAX_TEXT),
    ],
)
def test_titles(spec: dict[str, Any], title: str) -> None:
    """R-005, R-006: from the goal, the action or the type; an explicit title wins."""
    assert resolve(NewTask("code", spec=spec)).title == title
    assert resolve(NewTask("code", spec=spec, title="Mine")).title == "Mine"


def test_values_are_normalised() -> None:
    """R-010, R-025, R-052: duplicates are removed; capabilities are a set, models a list."""
    row = resolve(
        NewTask(
            "x",
            required_capabilities=["web", "python", "web"],
            model_preferences=["y", "x", "y"],
            fallback_models=["z", "z"],
            tags=["b", "a", "b"],
            max_cost_usd=0.1,
            heartbeat_interval_sec=7,
            priority=50.0,  # type: ignore[arg-type]
        )
    )

    assert row.required_capabilities == ("python", "web")
    assert (row.model_preferences, row.fallback_models, row.tags) == (("y", "x"), ("z",), ("b", "a"))
    assert row.lane == Lane("x", ("python", "web"), ("y", "x"), 0.1, Decimal("0.065536"))
    # One type per column: a list of mixed types could not be sent.
    assert (type(row.priority), type(row.heartbeat_interval_sec)) == (int, float)


# Limits in two places.


def test_limits_may_be_in_the_spec() -> None:
    """R-007."""
    constraints = {
        "max_cost_usd": 0.5,
        "max_duration_sec": 60,
        "required_capabilities": ["python"],
        "model_preferences": ["x"],
        "fallback_models": ["y"],
    }

    row = resolve(NewTask("x", spec={"constraints": constraints, "prompt": "p"}))

    assert (row.max_cost_usd, row.max_duration_sec) == (Decimal("0.5"), 60.0)
    assert (row.required_capabilities, row.model_preferences, row.fallback_models) == (
        ("python",),
        ("x",),
        ("y",),
    )
    assert json.loads(row.spec) == {"constraints": constraints, "prompt": "p"}


def test_limits_in_both_places_must_agree() -> None:
    """R-007: 0.5 and 0.50 are equal, as are a list and a tuple; other pairs are faults."""
    both = {"max_cost_usd": 0.5, "required_capabilities": ["a"], "max_duration_sec": 60.0}
    row = resolve(
        NewTask(
            "x",
            spec={"constraints": both},
            max_cost_usd=Decimal("0.50"),
            required_capabilities=("a",),
            max_duration_sec=60,
        )
    )
    assert row.max_cost_usd == Decimal("0.5")

    found = faults(
        NewTask(
            "x",
            spec={"constraints": both | {"model_preferences": ["x"]}},
            max_cost_usd=0.6,
            required_capabilities=["b"],
            model_preferences=["x", "y"],
            max_duration_sec=60,
        )
    )
    assert set(found) == {"max_cost_usd", "required_capabilities", "model_preferences"}
    assert "is 0.6 but spec.constraints has 0.5; give one" in found["max_cost_usd"]


def test_limits_in_the_spec_are_checked_like_any_other() -> None:
    """R-007."""
    bad = {
        "max_cost_usd": "a lot",
        "max_duration_sec": 0,
        "required_capabilities": "python",
        "model_preferences": [""],
        "fallback_models": [1],
    }
    assert set(faults(NewTask("x", spec={"constraints": bad}))) == set(bad)


@pytest.mark.parametrize("constraints", [["be quick", "be nice"], None, "none", {"other": 1}])
def test_a_list_of_constraints_is_kept_verbatim(constraints: Any) -> None:
    """R-006: a list of sentences sets no limits."""
    row = resolve(NewTask("x", spec={"constraints": constraints}))
    assert json.loads(row.spec) == {"constraints": constraints}
    assert row.max_cost_usd is None


# Faults.


def test_all_faults_are_reported_at_once_with_their_places() -> None:
    """R-009: one error is enough to fix them all."""
    task = NewTask(
        " ",
        id="../x",
        title="",
        priority=101,
        priority_boost_per_minute=-1,
        deadline=datetime(2026, 1, 1),  # noqa: DTZ001 - that is the fault
        run_at="soon",  # type: ignore[arg-type]
        depends_on="abc",
        tags=["ok", ""],
        lock_key="\0",
        max_cost_usd=-1,
        max_total_cost_usd=math.nan,
        max_duration_sec=0,
        heartbeat_interval_sec=1e12,
        max_attempts=0,
        preset="mine",
        retry=RetrySpec(strategy="random", initial_delay_sec=-1),
        output=OutputContract(validation="prayer"),
        spec={"context_refs": ["file:x"]},
        created_by="\ud800",
    )

    found = faults(task, place="tasks[3]")

    names = (
        "type id title priority priority_boost_per_minute deadline run_at depends_on tags lock_key"
        " max_cost_usd max_total_cost_usd max_duration_sec heartbeat_interval_sec max_attempts preset"
        " retry.strategy retry.initial_delay_sec output.validation spec.context_refs created_by"
    )
    assert set(found) == {f"tasks[3].{name}" for name in names.split()}
    assert "got 101" in found["tasks[3].priority"]
    assert set(faults(NewTask("x", priority=-1))) == {"priority"}


@pytest.mark.parametrize(
    "priority", [-1, 101, 50.5, "50", True, math.inf, math.nan, 10**400, Decimal("NaN"), []]
)
def test_invalid_priorities(priority: Any) -> None:
    """U1: whole numbers from 0 to 100, nothing else."""
    assert set(faults(NewTask("x", priority=priority))) == {"priority"}


@given(st.integers(0, 100))
def test_priorities(priority: int) -> None:
    """U1: zero is a priority, not a missing one."""
    assert resolve(NewTask("x", priority=priority)).priority == priority


@pytest.mark.parametrize(
    "value", [0, -1, math.nan, math.inf, Decimal("NaN"), Decimal("sNaN"), "1", True, 10**400, 0.04, None]
)
def test_durations(value: Any) -> None:
    """U11: at least a twentieth of a second, at most a year."""
    if value is None:
        assert resolve(NewTask("x", max_duration_sec=None)).max_duration_sec == 3600.0
    else:
        assert set(faults(NewTask("x", max_duration_sec=value))) == {"max_duration_sec"}


@pytest.mark.parametrize("value", ["a", "task_01J8K2M", "A.b-c_d", "9", "x" * 128])
def test_ids(value: str) -> None:
    """R-001: safe as a file name."""
    assert resolve(NewTask("x", id=value)).type == "x"


@pytest.mark.parametrize(
    "value", ["", "../x", "a/b", "a b", ".hidden", "-x", "_x", "ä", "x" * 129, "a\n", "a\0", 7]
)
def test_ids_that_are_not_file_names(value: Any) -> None:
    """R-001."""
    assert set(faults(NewTask("x", id=value))) == {"id"}


def test_sizes() -> None:
    """Hostile input: strings, lists and specs have limits."""
    long = "x" * (MAX_TEXT + 1)
    assert set(faults(NewTask("x", title=long, lock_key=long, idempotency_key=long))) == {
        "title",
        "lock_key",
        "idempotency_key",
    }
    assert set(faults(NewTask("x", tags=["t"] * (MAX_LIST + 1)))) == {"tags"}
    assert resolve(NewTask("x", depends_on=["t"] * MAX_DEPENDENCIES)).type == "x"
    assert set(faults(NewTask("x", depends_on=["t"] * (MAX_DEPENDENCIES + 1)))) == {"depends_on"}
    assert set(faults(NewTask("x", spec={"a": "x" * MAX_SPEC_BYTES}))) == {"spec"}
    assert len(resolve(NewTask("x", spec={"a": "x" * (MAX_SPEC_BYTES - 8)})).spec) == MAX_SPEC_BYTES


# Values that JSON or PostgreSQL can't represent.


@pytest.mark.parametrize("spec", [5, None, "text", ["constraints"], [], 0, object()])
def test_a_spec_is_an_object(spec: Any) -> None:
    """R-007: anything else is rejected."""
    assert set(faults(NewTask("x", spec=spec))) == {"spec"}
    with pytest.raises(InvalidInputError):
        Resolver()(NewTask("x", spec=spec))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("\0", id="U+0000"),
        pytest.param({"\0": 1}, id="U+0000 in a key"),
        pytest.param(["\\\0"], id="U+0000 after a backslash"),
        pytest.param("\ud800", id="surrogate"),
        pytest.param(math.nan, id="NaN"),
        pytest.param({"a": [{"b": -math.inf}]}, id="infinity"),
        pytest.param(nested(100_000), id="depth"),
    ],
)
def test_values_that_cannot_be_stored(value: Any) -> None:
    """Hostile input: U+0000, lone surrogates, NaN, and nesting that no parser survives."""
    assert set(faults(NewTask("x", spec={"deep": {"er": value}}))) == {"spec"}
    gate = OutputContract(validation="json-schema", validation_schema={"const": value})
    assert set(faults(NewTask("x", output=gate))) == {"output.validation_schema"}


@pytest.mark.parametrize(
    "value", ["\\u0000", "\\\\u0000", "u0000", "a\\", None, "null", 2**70, 1e300, nested(100)]
)
def test_values_that_look_unstorable(value: Any) -> None:
    """A backslash and the text u0000 are not U+0000, and null is not NaN."""
    row = resolve(NewTask("x", spec={"a": value}))
    assert json.loads(row.spec) == {"a": value}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec="utf-8") | st.sampled_from('\0\\u0"'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def storable(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, dict):
        return all(map(storable, value)) and all(map(storable, value.values()))
    return all(map(storable, value)) if isinstance(value, list) else True


@given(JSON)
def test_a_spec_is_stored_unchanged_or_rejected(value: Any) -> None:
    """R-006."""
    task = NewTask("x", spec={"a": value})
    if storable(value):
        assert json.loads(resolve(task).spec) == {"a": value}
    else:
        assert set(faults(task)) == {"spec"}


# References.


def test_references() -> None:
    """R-008: tasks are implicit dependencies, artifacts must exist; each once."""
    refs = ["task:a:output", "artifact:logo", "task:b:c:output", "task:a:output", "artifact:s3://x:y"]

    row = resolve(NewTask("x", spec={"context_refs": refs}))
    assert (row.context_tasks, row.context_artifacts) == (("a", "b:c"), ("logo", "s3://x:y"))


@pytest.mark.parametrize(
    "refs", ["task:a:output", 7, None, [7], {"a": 1}, ["task:a"], ["task::output"], ["artifact:"], [""]]
)
def test_invalid_references(refs: Any) -> None:
    """R-008: a misspelt reference is reported, not ignored."""
    assert set(faults(NewTask("x", spec={"context_refs": refs}))) == {"spec.context_refs"}


# Retry policies.


def test_only_given_fields_of_a_policy_are_stored() -> None:
    """R-019, U3: the others follow the preset."""
    row = resolve(NewTask("x", preset="loki", retry=RetrySpec(initial_delay_sec=5, max_delay_sec=None)))

    assert row.retry is not None
    stored = json.loads(row.retry)
    assert stored == {"initial_delay_sec": 5, "max_delay_sec": None}
    found = policy(stored, row.preset)
    assert (found.initial_delay_sec, found.max_delay_sec, found.jitter) == (5, None, False)
    assert found.backoff_multiplier == 2.0


@pytest.mark.parametrize("kind", [tuple, list])
def test_categories_of_a_policy(kind: type) -> None:
    """R-118: a list or a tuple, in any spelling; twice, because of the cache."""
    for _ in range(2):
        row = resolve(
            NewTask("x", retry=RetrySpec(retry_on=kind(["Timeout", "my own"]), no_retry_on=kind([])))
        )
        assert row.retry is not None
        found = policy(json.loads(row.retry), row.preset)
        assert found.retry_on == (FailureCategory.TIMEOUT, "my own")
        assert found.no_retry_on == ()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"strategy": "hope"}, "strategy"),
        ({"initial_delay_sec": -1}, "initial_delay_sec"),
        ({"backoff_multiplier": 0.5}, "backoff_multiplier"),
        ({"max_delay_sec": math.inf}, "max_delay_sec"),
        ({"jitter": "yes"}, "jitter"),
        ({"retry_on": ("",)}, "retry_on"),
        ({"retry_on": [["x"]]}, "retry_on"),
        ({"no_retry_on": "crash"}, "no_retry_on"),
    ],
)
def test_invalid_policies(given: dict[str, Any], name: str) -> None:
    """R-019."""
    assert set(faults(NewTask("x", retry=RetrySpec(**given)))) == {f"retry.{name}"}


@given(st.sampled_from(list(Strategy)), st.floats(0, 1e6), st.none() | st.floats(0, 1e6), st.booleans())
def test_a_policy_survives_the_round_trip(
    strategy: Strategy, delay: float, longest: float | None, jitter: bool
) -> None:
    """R-019."""
    spec = RetrySpec(strategy=strategy, initial_delay_sec=delay, max_delay_sec=longest, jitter=jitter)
    row = resolve(NewTask("x", retry=spec))
    assert row.retry is not None
    found = policy(json.loads(row.retry), row.preset)
    assert (found.strategy, found.jitter) == (strategy, jitter)
    assert (found.initial_delay_sec, found.max_delay_sec) == (delay, longest)


# Gates.


@pytest.mark.parametrize(
    ("output", "gates"),
    [
        (OutputContract(), None),
        (OutputContract(validation="none", validation_schema={}), None),
        (OutputContract(validation=(Gate("none"),)), None),
        (OutputContract(validation="regex", validation_schema="^a"), [{"method": "regex", "schema": "^a"}]),
        (
            OutputContract(validation=(Gate("json-schema", {"type": "object"}), Gate("none"), Gate("human"))),
            [{"method": "json-schema", "schema": {"type": "object"}}, {"method": "human", "schema": None}],
        ),
    ],
)
def test_gates(output: OutputContract, gates: Any) -> None:
    """R-095, F-38: one method with its schema, or several in order."""
    row = resolve(NewTask("x", output=output))
    assert (None if row.gates is None else json.loads(row.gates)) == gates


def test_an_unknown_gate() -> None:
    """R-095: rejected at submission, each by name."""
    output = OutputContract(validation=(Gate("regex", "x"), Gate("prayer"), Gate("luck")), type="\0")
    with pytest.raises(InvalidInputError) as caught:
        resolve(NewTask("x", output=output))
    assert [name for name, _ in caught.value.errors] == [
        "output.validation",
        "output.validation",
        "output.type",
    ]
    assert "'luck'" in str(caught.value)


# Different ways to write a task.


def test_what_the_http_api_reads_is_the_same_task() -> None:
    """The same struct is decoded from JSON; a misspelt field is rejected."""
    body = b'{"type": "x", "priority": 3, "children": [{"type": "y"}], "retry": {"max_delay_sec": null}}'
    task = msgspec.json.decode(body, type=NewTask)
    assert (task.priority, task.children[0].type) == (3, "y")
    assert json.loads(resolve(task).retry or b"") == {"max_delay_sec": None}
    with pytest.raises(msgspec.ValidationError, match="priorty"):
        msgspec.json.decode(b'{"type": "x", "priorty": 3}', type=NewTask)


def test_gates_may_be_plain_dictionaries() -> None:
    """R-095: Python callers need not import the classes."""
    listed: Any = [{"method": "regex", "schema": "x"}, Gate("human"), {"method": "none"}]
    contract: Any = {"validation": "regex", "validation_schema": "x", "require_decision_report": True}

    several = resolve(NewTask("x", output=OutputContract(validation=listed)))
    whole = resolve(NewTask("x", output=contract))

    assert [gate["method"] for gate in json.loads(several.gates or b"")] == ["regex", "human"]
    assert (json.loads(whole.gates or b"")[0]["schema"], whole.require_decision_report) == ("x", True)


@pytest.mark.parametrize(
    ("contract", "place", "said"),
    [
        (OutputContract(validation=[{"metod": "regex"}]), "output.validation", "metod"),  # type: ignore[list-item]
        (OutputContract(validation=[Gate(7)]), "output.validation", "`str`, got `int`"),  # type: ignore[arg-type]
        (OutputContract(validation=["regex"]), "output.validation", "`object`, got `str`"),  # type: ignore[list-item]
        (OutputContract(validation=7), "output.validation", "a list of gates"),  # type: ignore[arg-type]
        ({"valdation": "regex"}, "output", "valdation"),
        ("regex", "output", "must be an OutputContract"),
    ],
)
def test_invalid_contracts(contract: Any, place: str, said: str) -> None:
    """Hostile input: an InvalidInputError, not a TypeError."""
    with pytest.raises(InvalidInputError) as refused:
        resolve(NewTask("x", output=contract))

    ((found, fault),) = refused.value.errors
    assert found == place
    assert said in fault


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"strategy": "fixed", "max_delay_sec": 7.0},
        {"retry_on": ["timeout", "my_own"]},
        {"retry_on": ["auth_failure"]},
        {"no_retry_on": ["crash"]},
        {"no_retry_on": []},
        {"retry_on": ["timeout"], "no_retry_on": ["rate_limit"]},
    ],
)
def test_a_retry_policy_that_was_read_can_be_sent_and_means_the_same(
    preset: str, asked: dict[str, Any]
) -> None:
    """R-019: for every category, also one that no list names."""
    original = policy(asked, preset)
    read = msgspec.to_builtins(original.effective)
    assert None not in (read["retry_on"], read["no_retry_on"])

    sent = msgspec.convert(read, RetrySpec)
    stored = resolve(NewTask("x", retry=sent, preset=preset)).retry

    again = policy(msgspec.json.decode(stored or b"null"), preset)
    for category in (*FailureCategory, "my_own", "strange"):
        assert again.retries(category) is original.retries(category), category
    assert again.effective == original.effective


@pytest.mark.parametrize(
    "creator", ["agent:a1", "human:ann", "cron:daily", "event:push", "dag:d", "system:rule"]
)
def test_a_creator_has_a_known_prefix(creator: str) -> None:
    """R-023."""
    assert resolve(NewTask("x", created_by=creator)).created_by == creator


@pytest.mark.parametrize("creator", ["ann", "robot:r2", "human:", "human: ", "Human:ann", ":ann", ""])
def test_any_other_creator_is_refused(creator: str) -> None:
    """R-023."""
    assert set(faults(NewTask("x", created_by=creator))) == {"created_by"}


def test_a_delay_above_the_longest_of_the_preset_is_kept() -> None:
    """Whoever asks for ten minutes waits ten minutes; an explicit max_delay_sec still limits it."""
    asked = {"strategy": "fixed", "initial_delay_sec": 600, "jitter": False}
    for strategy in ("fixed", "exponential"):
        found = policy({**asked, "strategy": strategy}, "factory")
        assert (found.max_delay_sec, retry_delay(found, 1, lambda: 0.5)) == (600, 600)
    assert retry_delay(policy({**asked, "max_delay_sec": 60}, "factory"), 1, lambda: 0.5) == 60
    assert policy({"initial_delay_sec": 20}, "factory").max_delay_sec == 300
