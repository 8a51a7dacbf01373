"""New tasks: what a caller submits, and the row it becomes with presets, constraints and defaults filled in.

`NewTask` is what callers write and what the HTTP API reads. `resolve` checks all of it, reports all faults at
once, and returns a `TaskRow`: the columns of a new task. A limit may be in the task or in `spec.constraints`;
if it is in both, the values must be equal.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypedDict, Unpack

import msgspec
from msgspec import UNSET, Struct, UnsetType

from lineshaft.errors import InvalidInputError
from lineshaft.model.admission import LockKey, admission
from lineshaft.model.budget import attempt_limit, money, shown
from lineshaft.model.durations import Duration, in_seconds
from lineshaft.model.field_order import with_order
from lineshaft.model.fields import (
    CHECKS,
    LIMIT_CHECKS,
    MAX_TEXT,
    REPLACE_WAITING,
    RETURN,
    STEERING,
    Faults,
    encoded_json,
    invalid,
    stored_json,
)
from lineshaft.model.parts import INDEX, ITEM, ForEach, for_each_faults
from lineshaft.model.presets import FACTORY, Preset, preset_named
from lineshaft.model.priority import DEFAULT_PRIORITY, Lane
from lineshaft.model.retry import DEFAULT_MAX_DURATION_SEC, DEFAULT_RETRY_ON, RetryPolicy

MAX_CHILD_DEPTH = 10
#: Tasks that a DAG may be created with, unless the installation has another limit.
MAX_DAG_TASKS = 10_000
MAX_SPAWN_DEPTH = 20
MAX_SPAWNED_TASKS = 10_000

#: The built-in methods to check an output; a registry of checks may have more.
GATE_METHODS = frozenset({"none", "json-schema", "regex", "test-pass", "llm-judge", "human"})
#: Fields that may be in the task or in `spec.constraints`.
LIMITS_IN_SPEC = (
    "max_cost_usd",
    "max_duration_sec",
    "required_capabilities",
    "model_preferences",
    "fallback_models",
)


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class _Model(Protocol):
        """A model of pydantic."""

        def model_dump(self, *, mode: str = "python") -> dict[str, Any]: ...

    Spec = Mapping[str, Any] | DataclassInstance | Struct | _Model
else:
    # What a task contains once it is created, and what JSON is decoded to.
    Spec = Mapping[str, Any]


class RetrySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A field that is left out takes the preset's value."""

    strategy: str | UnsetType = UNSET
    initial_delay_sec: float | UnsetType = UNSET
    backoff_multiplier: float | UnsetType = UNSET
    max_delay_sec: float | UnsetType | None = UNSET
    jitter: bool | UnsetType = UNSET
    retry_on: tuple[str, ...] | UnsetType = UNSET
    no_retry_on: tuple[str, ...] | UnsetType = UNSET


def retry_spec(value: Any, faults: Faults) -> RetrySpec | None:
    """A policy, also from a dict of its fields, which is what it is over HTTP and in files."""
    if isinstance(value, RetrySpec):
        return value
    try:
        return msgspec.convert(value, RetrySpec)
    except msgspec.ValidationError as error:
        faults.append(("retry", f"must be a RetrySpec, or an object with its fields: {error}"))
        return None


class TypeLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits that tasks of a type get where they leave them out; None: the type has no default."""

    max_cost_usd: Decimal | float | None = None
    max_attempts: int | None = None
    max_duration_sec: float | None = None
    retry: RetrySpec | None = None


LIMITS_OF_TYPES = TypeLimits.__struct_fields__
#: The bits of `TaskRow.open_limits`.
OPEN_COST, OPEN_ATTEMPTS, OPEN_DURATION, OPEN_RETRY = 1, 2, 4, 8
_OPEN = dict(zip(LIMITS_OF_TYPES, (OPEN_COST, OPEN_ATTEMPTS, OPEN_DURATION, OPEN_RETRY), strict=True))


def bits_of(names: Iterable[str]) -> int:
    """The bits of these limits; other names have none."""
    return sum(_OPEN.get(name, 0) for name in set(names))


class KnownType(NamedTuple):
    limits: TypeLimits
    #: It grows with each change.
    revision: int


class KnownTypes(NamedTuple):
    """The types with defaults, as they were at one time."""

    by_name: Mapping[str, KnownType] = MappingProxyType({})
    #: The highest of all types.
    revision: int = 0
    #: Quotas bound waiting tasks: submissions look at these bounds first.
    checks_waiting: bool = False


class Gate(Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    schema: Any = None


#: What an output may be declared as.
OUTPUT_TYPES = ("code", "markdown", "json", "artifact")


def output_type_fault(value: str) -> str | None:
    return None if value in OUTPUT_TYPES else f"must be one of {', '.join(OUTPUT_TYPES)}, got {shown(value)}"


class OutputContract(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str | None = None
    #: One method, with its schema in `validation_schema`, or several gates in order.
    validation: str | Sequence[Gate] = "none"
    validation_schema: Any = None
    require_decision_report: bool | None = None

    @property
    def gates(self) -> tuple[Gate, ...]:
        if isinstance(self.validation, str):
            return () if self.validation == "none" else (Gate(self.validation, self.validation_schema),)
        return tuple(gate for gate in self.validation if gate.method != "none")


class TaskDefaults(TypedDict, total=False):
    """Fields of a task that a task type may preset. A duration may be a timedelta."""

    title: str | None
    priority: int | None
    priority_boost_per_minute: float | None
    lock_key: str | None
    lock_keys: Sequence[str | LockKey]
    quota_keys: Sequence[str]
    fair_key: str | None
    required_capabilities: Sequence[str] | None
    model_preferences: Sequence[str] | None
    fallback_models: Sequence[str] | None
    max_cost_usd: Decimal | float | None
    max_total_cost_usd: Decimal | float | None
    max_duration_sec: Duration | None
    heartbeat_interval_sec: Duration | None
    max_attempts: int | None
    retry: RetrySpec | None
    output: OutputContract | None
    tags: Sequence[str]
    created_by: str | None
    preset: str | None


class TaskOptions(TaskDefaults, total=False):
    """Fields of a task besides its type and spec. A duration may be a timedelta."""

    key: str | None
    id: str | None
    deadline: datetime | None
    expire_at_deadline: bool
    run_at: datetime | None
    depends_on: Sequence[str]
    inputs: Mapping[str, str | Sequence[str]] | None
    for_each: ForEach | None
    parent_id: str | None
    dag_id: str | None
    idempotency_key: str | None
    idempotency_ttl_sec: Duration | None
    on_conflict: str | None
    debounce_sec: Duration | None
    max_wait_sec: Duration | None
    on_failure: str | None
    children: "Sequence[NewTask]"


def _plain(spec: object) -> object:
    """The fields of an object; what has none is refused later, when the task is checked."""
    if isinstance(spec, Mapping):
        return spec
    if hasattr(spec, "model_dump"):
        return spec.model_dump(mode="json")
    if isinstance(spec, Struct) or (is_dataclass(spec) and not isinstance(spec, type)):
        return msgspec.to_builtins(spec)
    return spec


class _NewTaskMeta(msgspec.StructMeta):
    """Explains wrong arguments."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 - of a metaclass
            try:
                return super().__call__(*args, **fields)
            except TypeError:
                if len(args) > 1:
                    raise TypeError(
                        "Only the type of a task is given without a name. Write "
                        f"NewTask({args[0]!r}, spec={{…}})."
                    ) from None
                check_options(fields, cls.__struct_fields__)
                raise


#: Names that other queues have for options.
_KNOWN_ELSEWHERE = {
    "args": "spec",
    "countdown": "delay",
    "eta": "run_at",
    "kwargs": "spec",
    "max_retries": "max_attempts",
    "name": "type",
    "payload": "spec",
    "retries": "max_attempts",
    "timeout": "max_duration_sec",
}


def check_options(names: Iterable[str], allowed: Collection[str]) -> None:
    """Raise TypeError for an unknown option, with the one that was probably meant."""
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            meant = _KNOWN_ELSEWHERE.get(name) or (near[0] if near else None)
            hint = f"did you mean {meant}?" if meant else f"known are: {', '.join(sorted(allowed))}."
            raise TypeError(f"Unknown option {name}; {hint}")


class _Typed(Struct, frozen=True, metaclass=_NewTaskMeta):
    type: str


class NewTask(_Typed, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task to submit. Only the type is required."""

    #: A name within the same call, for the `depends_on` of other tasks. Not stored.
    key: str | None = None
    id: str | None = None
    title: str | None = None
    #: For the handler. The fields of a dataclass, a Struct or a pydantic model become the object.
    spec: Spec = {}
    priority: int | None = None
    priority_boost_per_minute: float | None = None
    deadline: datetime | None = None
    #: CANCELLED when the deadline passes, instead of merely late.
    expire_at_deadline: bool = False
    run_at: datetime | None = None
    depends_on: Sequence[str] = ()
    #: Outputs of other tasks that the handler gets, by name: a key of the same call, or an id, with a path if
    #: it gets a part of the output (`scan.files.0`); or a list of them. The task waits for these tasks.
    inputs: Mapping[str, str | Sequence[str]] | None = None
    #: One child with this task's type, spec and limits for each item of a list that another task of the call
    #: returns. Each gets the inputs `item` and `index`; the task's output is the list of their outputs.
    for_each: ForEach | None = None
    #: An existing task, whose DAG this one joins.
    parent_id: str | None = None
    #: An existing DAG to join.
    dag_id: str | None = None
    lock_key: str | None = None
    #: Several document locks, taken together: keys, or LockKey for shared ones.
    lock_keys: Sequence[str | LockKey] = ()
    #: Keys for quotas, besides those of its type, model, account, agent and tags.
    quota_keys: Sequence[str] = ()
    #: One of its quota keys: tasks take turns between the values of it.
    fair_key: str | None = None
    required_capabilities: Sequence[str] | None = None
    model_preferences: Sequence[str] | None = None
    fallback_models: Sequence[str] | None = None
    max_cost_usd: Decimal | float | None = None
    max_total_cost_usd: Decimal | float | None = None
    max_duration_sec: float | None = None
    heartbeat_interval_sec: float | None = None
    max_attempts: int | None = None
    retry: RetrySpec | None = None
    output: OutputContract | None = None
    idempotency_key: str | None = None
    #: How long the key stays in force after the task has completed; None: forever.
    idempotency_ttl_sec: float | None = None
    #: What happens if a task has the key already: `return` it (the default), `reject` this one,
    #: `replace_waiting` or `cancel_running`.
    on_conflict: str | None = None
    #: With `replace_waiting`: it starts so long after the last submission, ...
    debounce_sec: float | None = None
    #: ... but no later than so long after the first one.
    max_wait_sec: float | None = None
    tags: Sequence[str] = ()
    created_by: str | None = None
    #: What becomes of its DAG if a spawned task is a dead letter: `block` it (the default) or `ignore` that.
    on_failure: str | None = None
    #: Run in this order; the task itself then has no work of its own.
    children: "Sequence[NewTask]" = ()
    #: Defaults for retry, boost, limits and reports; a child inherits its parent's.
    preset: str | None = None

    def __post_init__(self) -> None:
        if type(self.spec) is not dict:
            msgspec.structs.force_setattr(self, "spec", _plain(self.spec))

    def with_options(self, **options: Unpack[TaskOptions]) -> Self:
        """Return a copy with these fields."""
        try:
            return msgspec.structs.replace(self, **in_seconds(options))
        except TypeError:
            check_options(options, self.__struct_fields__)
            raise


class TaskRow(Struct, frozen=True, kw_only=True, gc=False):
    """The columns of a new task, except its id and its place in a graph."""

    type: str
    title: str
    spec: bytes
    preset: str
    priority: int
    priority_boost_per_minute: float
    deadline: datetime | None
    run_at: datetime | None
    lock_key: str | None
    #: Its quota keys, fair key and locks, as JSON; None: none.
    admission: bytes | None
    required_capabilities: tuple[str, ...]
    model_preferences: tuple[str, ...]
    fallback_models: tuple[str, ...]
    max_cost_usd: Decimal | None
    max_total_cost_usd: Decimal | None
    max_duration_sec: float
    heartbeat_interval_sec: float | None
    max_attempts: int
    retry: bytes | None
    output_type: str | None
    gates: bytes | None
    require_decision_report: bool
    idempotency_key: str | None
    idempotency_ttl_sec: float | None
    on_conflict: str
    debounce_sec: float | None
    max_wait_sec: float | None
    tags: tuple[str, ...]
    created_by: str | None
    ignore_failure: bool
    expire_at_deadline: bool
    #: Limits that the caller left to the type: OPEN_COST and the others.
    open_limits: int
    #: The revision of its type's defaults; None: it has none.
    type_revision: int | None
    #: Tasks named by `spec.context_refs`: implicit dependencies.
    context_tasks: tuple[str, ...]
    #: Ids of artifacts named by `spec.context_refs`.
    context_artifacts: tuple[str, ...]
    for_each: ForEach | None = None

    @property
    def lane(self) -> Lane:
        return Lane.of(
            self.type,
            self.required_capabilities,
            self.model_preferences,
            self.priority_boost_per_minute,
            attempt_limit(self.max_cost_usd, self.max_total_cost_usd),
        )


GateFaults = Callable[[Sequence[Gate]], Iterable[tuple[str, str]]]
"""Returns the faults of gates: (field within `output`, fault) pairs."""


class TaskRules(NamedTuple):
    """What an installation adds to the checks and defaults of new tasks."""

    #: Checks the schemas of gates; without it only their methods are checked.
    gate_faults: GateFaults | None = None
    #: The preset of tasks that name none: that of the API which they come over.
    preset: str = FACTORY.name
    #: The time limit of an attempt where neither the task nor its preset has one.
    max_duration_sec: float = DEFAULT_MAX_DURATION_SEC
    #: Tasks that a call may create in one DAG, including children.
    max_dag_tasks: int = MAX_DAG_TASKS
    #: Levels of spawned tasks below a submitted one, and spawned tasks of a DAG.
    max_spawn_depth: int = MAX_SPAWN_DEPTH
    max_spawned_tasks: int = MAX_SPAWNED_TASKS
    #: Limits of tasks that leave them out, by type.
    types: KnownTypes = KnownTypes()


DEFAULT_RULES = TaskRules()


def _check_companions(task: NewTask, faults: Faults) -> None:
    """Fields that mean nothing without another one."""
    if task.idempotency_ttl_sec is not None and task.idempotency_key is None:
        faults.append(("idempotency_ttl_sec", "is the window of an idempotency_key, which is missing"))
    if task.expire_at_deadline and task.deadline is None:
        faults.append(("expire_at_deadline", "is about the deadline, which is missing"))
    if task.on_conflict is not None:
        if task.idempotency_key is None:
            faults.append(("on_conflict", "is about an idempotency_key, which is missing"))
        if task.on_conflict in STEERING and task.children:
            faults.append(("on_conflict", f"can't be {task.on_conflict} for a batch: it has children"))
    if task.debounce_sec is not None:
        if task.on_conflict != REPLACE_WAITING:
            faults.append(("debounce_sec", f"needs on_conflict {REPLACE_WAITING}"))
        if task.run_at is not None:
            faults.append(("run_at", "can't be given together with debounce_sec, which sets it"))
    elif task.max_wait_sec is not None:
        faults.append(("max_wait_sec", "limits debounce_sec, which is missing"))


def _for_each(task: NewTask, spec: Mapping[str, Any], faults: Faults) -> ForEach | None:
    """Also from a dict of its fields."""
    if task.for_each is None:
        return None
    try:
        for_each = msgspec.convert(msgspec.to_builtins(task.for_each), ForEach)
    except (msgspec.ValidationError, TypeError) as error:
        faults.append(("for_each", f"must be a ForEach, or an object with its fields: {error}"))
        return None
    faults += for_each_faults(for_each)
    for name in ("children", "run_at"):
        if getattr(task, name):
            faults.append((name, "is not possible together with for_each"))
    taken = [name for name in (ITEM, INDEX) for values in (task.inputs, spec) if name in (values or ())]
    if taken:
        faults.append(("for_each", f"gives each child the input {taken[0]!r}: use another name for your own"))
    return for_each


def resolve(task: NewTask, *, place: str = "", rules: TaskRules = DEFAULT_RULES) -> TaskRow:
    """Check a task and fill in what its caller left out; `place` names it in errors (`tasks[3]`)."""
    faults: Faults = []
    fields: Any = task.spec
    if not isinstance(fields, Mapping):
        faults.append(("spec", f"must be an object, got {shown(fields)}"))
        fields = {}
    limits = _constraints(task, faults) if "constraints" in fields else None
    # Most fields of most tasks are left out; this loop matters for bulk submissions.
    for name, check in CHECKS.items():
        value = getattr(task, name)
        if value is not None and (fault := check(value)):
            faults.append((name, fault))
    for name, check in LIMIT_CHECKS.items():
        value = limits[name] if limits else getattr(task, name)
        if value is not None and (fault := check(value)):
            faults.append((name, fault))
    output = _NO_CONTRACT if task.output is None else _contract(task.output, faults)
    defaults = preset_named(rules.preset if task.preset is None else task.preset)
    kind = rules.types.by_name.get(task.type)
    open_limits, filled = _filled_limits(task, limits, defaults, _NO_LIMITS if kind is None else kind.limits)
    policy_given = None if filled.retry is None else retry_spec(filled.retry, faults)
    retry = None if policy_given is None else _retry_json(policy_given, defaults.name, faults)
    gates = output.gates if task.output else ()
    checks = _gates_json(gates, rules.gate_faults or _unknown_methods, faults) if gates else None
    if output.type is not None and (fault := output_type_fault(output.type)):
        faults.append(("output.type", fault))
    _check_companions(task, faults)
    for_each = _for_each(task, fields, faults)
    lock_key, needs = task.lock_key, None
    if task.quota_keys or task.lock_keys or task.fair_key is not None:
        lock_key, needs = admission(task.quota_keys, task.fair_key, task.lock_keys, task.lock_key, faults)
        if task.fair_key is not None and "human" in (task.required_capabilities or ()):
            faults.append(("fair_key", "must be left out of tasks for people, who choose among all of them"))
    spec = stored_json("spec", fields, faults) if fields else b"{}"
    refs, artifacts = _context_refs(fields, faults) if "context_refs" in fields else ((), ())
    if faults:
        raise invalid(faults, place)
    boost, report = task.priority_boost_per_minute, output.require_decision_report
    heartbeat = task.heartbeat_interval_sec
    capabilities = limits["required_capabilities"] if limits else task.required_capabilities
    return TaskRow(
        type=task.type,
        title=task.title or _title(task),
        spec=spec,
        preset=defaults.name,
        priority=DEFAULT_PRIORITY if task.priority is None else int(task.priority),
        priority_boost_per_minute=defaults.boost_per_minute if boost is None else float(boost),
        deadline=task.deadline,
        run_at=task.run_at,
        lock_key=lock_key,
        admission=needs,
        # Their order has no meaning, and sorting makes fewer lanes.
        required_capabilities=tuple(sorted(set(capabilities))) if capabilities else (),
        model_preferences=_names(limits["model_preferences"] if limits else task.model_preferences),
        fallback_models=_names(limits["fallback_models"] if limits else task.fallback_models),
        max_cost_usd=None if filled.max_cost_usd is None else money(filled.max_cost_usd),
        max_total_cost_usd=None if task.max_total_cost_usd is None else money(task.max_total_cost_usd),
        max_duration_sec=float(
            filled.max_duration_sec or defaults.max_duration_sec or rules.max_duration_sec
        ),
        heartbeat_interval_sec=None if heartbeat is None else float(heartbeat),
        max_attempts=filled.max_attempts or defaults.max_attempts,
        retry=retry,
        output_type=output.type,
        gates=checks,
        require_decision_report=defaults.require_decision_report if report is None else report,
        idempotency_key=task.idempotency_key,
        idempotency_ttl_sec=task.idempotency_ttl_sec,
        on_conflict=task.on_conflict or RETURN,
        debounce_sec=task.debounce_sec,
        max_wait_sec=task.max_wait_sec,
        tags=_names(task.tags),
        created_by=task.created_by,
        ignore_failure=task.on_failure == "ignore",
        expire_at_deadline=task.expire_at_deadline,
        open_limits=open_limits,
        type_revision=None if kind is None else kind.revision,
        context_tasks=refs,
        context_artifacts=artifacts,
        for_each=for_each,
    )


def _filled_limits(
    task: NewTask, in_spec: Mapping[str, Any] | None, preset: Preset, of_type: TypeLimits
) -> tuple[int, TypeLimits]:
    """The limits that the type decides, as bits; and the limits of the task and its type together.

    A preset that the caller names comes before the defaults of the type; that of an API comes after them.
    """
    cost = in_spec["max_cost_usd"] if in_spec else task.max_cost_usd
    duration = in_spec["max_duration_sec"] if in_spec else task.max_duration_sec
    names_none = task.preset is None
    open_limits = (
        (OPEN_COST if cost is None else 0)
        | (OPEN_ATTEMPTS if names_none and task.max_attempts is None else 0)
        | (OPEN_DURATION if duration is None and (names_none or preset.max_duration_sec is None) else 0)
        | (OPEN_RETRY if names_none and task.retry is None else 0)
    )
    return open_limits, TypeLimits(
        max_cost_usd=of_type.max_cost_usd if open_limits & OPEN_COST else cost,
        max_attempts=of_type.max_attempts if open_limits & OPEN_ATTEMPTS else task.max_attempts,
        max_duration_sec=of_type.max_duration_sec if open_limits & OPEN_DURATION else duration,
        retry=of_type.retry if open_limits & OPEN_RETRY else task.retry,
    )


_NO_LIMITS = TypeLimits()
_NO_CONTRACT = OutputContract()


def _contract(contract: Any, faults: Faults) -> OutputContract:
    """Python callers may pass the contract, or its gates, as plain dictionaries."""
    try:
        if not isinstance(contract, OutputContract):
            return msgspec.convert(msgspec.to_builtins(contract), OutputContract)
        if isinstance(contract.validation, str):
            return contract
        listed = msgspec.convert(msgspec.to_builtins(contract.validation), tuple[Gate, ...])
        return msgspec.structs.replace(contract, validation=listed)
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        if isinstance(contract, OutputContract):
            fault = f"must be a method, or a list of gates, {{method, schema}} each: {error}"
            faults.append(("output.validation", fault))
        else:
            faults.append(("output", f"must be an OutputContract, or an object like one: {error}"))
        return _NO_CONTRACT


def _constraints(task: NewTask, faults: Faults) -> dict[str, Any]:
    """The limits, from the task or from `spec.constraints`, which may also be a list of sentences."""
    spec: Any = task.spec
    constraints = spec["constraints"]
    limits = {name: getattr(task, name) for name in LIMITS_IN_SPEC}
    if isinstance(constraints, dict):
        for name in LIMITS_IN_SPEC:
            value = constraints.get(name)
            if value is None:
                continue
            if limits[name] is None:
                limits[name] = value
            elif not _agree(limits[name], value):
                faults.append(
                    (name, f"is {shown(limits[name])} but spec.constraints has {shown(value)}; give one")
                )
    return limits


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    if isinstance(one, Sequence) and isinstance(other, Sequence):
        return list(one) == list(other)
    try:
        return Decimal(str(one)) == Decimal(str(other))
    except ArithmeticError:
        return False


def _title(task: NewTask) -> str:
    spec: Any = task.spec
    for name in ("goal", "action"):
        value = spec.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()[:MAX_TEXT]
    return task.type


def _names(values: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values)) if values else ()


def _context_refs(spec: Mapping[str, Any], faults: Faults) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tasks and the artifacts that a spec refers to."""
    refs = spec["context_refs"]
    if not isinstance(refs, list | tuple) or not all(isinstance(ref, str) for ref in refs):
        faults.append(("spec.context_refs", f"must be a list of texts, got {shown(refs)}"))
        return (), ()
    tasks, artifacts = [], []
    for ref in refs:
        kind, _, rest = ref.partition(":")
        name, _, what = rest.rpartition(":")
        if kind == "task" and name and what == "output":
            tasks.append(name)
        elif kind == "artifact" and rest:
            artifacts.append(rest)
        else:
            faults.append(("spec.context_refs", f"must be artifact:ID or task:ID:output, got {shown(ref)}"))
    return tuple(dict.fromkeys(tasks)), tuple(dict.fromkeys(artifacts))


def _gates_json(gates: Sequence[Gate], gate_faults: GateFaults, faults: Faults) -> bytes:
    before = len(faults)
    ordered = [Gate(gate.method, with_order(gate.schema)) for gate in gates]
    encoded = stored_json("output.validation_schema", ordered, faults)
    # Don't check schemas that aren't JSON or are too large.
    if len(faults) == before:
        faults += [(f"output.{place}", fault) for place, fault in gate_faults(gates)]
    return encoded


def _unknown_methods(gates: Sequence[Gate]) -> Iterable[tuple[str, str]]:
    for gate in gates:
        if gate.method not in GATE_METHODS:
            yield (
                "validation",
                f"must be one of {', '.join(sorted(GATE_METHODS))}, got {shown(gate.method)}",
            )


def _retry_json(spec: RetrySpec, preset: str, faults: Faults) -> bytes | None:
    """Only the given fields are stored; NULL means the preset's policy."""
    try:
        try:
            return _checked_retry(spec, preset)
        except TypeError:  # lists can't be hashed for the cache
            return _checked_retry.__wrapped__(spec, preset)
    except InvalidInputError as error:
        faults += [(f"retry.{name}", fault) for name, fault in error.errors]
        return None


@lru_cache(maxsize=256)
def _checked_retry(spec: RetrySpec, preset: str) -> bytes:
    policy(msgspec.structs.asdict(spec), preset)
    return encoded_json("categories", spec)


def policy(stored: Mapping[str, Any] | None, preset: str) -> RetryPolicy:
    """The retry policy of a task, from its row."""
    base = preset_named(preset).retry
    if not stored:
        return base
    overrides: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in stored.items()
        if value is not UNSET
    }
    first, longest = overrides.get("initial_delay_sec"), base.max_delay_sec
    if first is not None and longest is not None and first > longest:
        # The caller asks for a longer delay than the preset's longest.
        overrides.setdefault("max_delay_sec", first)
    merged = replace(base, **overrides)
    # An effective policy that was read and sent back, as `RetryPolicy.effective` makes it of left-out lists.
    if merged.no_retry_on is not None and merged.retry_on == DEFAULT_RETRY_ON:
        merged = replace(merged, retry_on=None)
    return merged
