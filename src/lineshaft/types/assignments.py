"""Assignments: claimed tasks with everything that is needed to work on them."""

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, field

from lineshaft.model.parts import NoSuchPartError, Source, part_of
from lineshaft.types.data_refs import data_ref_in
from lineshaft.types.json import JsonStruct, decoded, empty_list, null, raw
from lineshaft.types.tasks import Task
from lineshaft.types.work import Child, Claim, ClaimedTask, ClaimRef, PastAttempt, Resumed, decoded_inputs

T = TypeVar("T", Task, ClaimedTask)

_EMPTY = Raw(b"{}")
_NOTHING_BEFORE = Resumed("")
_steps = msgspec.json.Decoder(dict[str, Raw]).decode
_digests = msgspec.json.Decoder(dict[str, str | None]).decode


def _empty() -> Raw:
    return _EMPTY


class Assignment(JsonStruct, Generic[T], frozen=True, kw_only=True):
    """One claimed task: the full task object, or a `ClaimedTask`, which is cheaper to produce."""

    task: T
    #: Authenticates every call about this claim. Opaque.
    claim_token: str
    model: str | None
    #: The account to use; null: the instance has none.
    account: str | None = None
    #: By name: outputs of the tasks in `inputs`, `depends_on` and `spec.context_refs`; metadata of artifacts.
    inputs_json: dict[str, Raw] = field(name="inputs", default_factory=dict)
    #: Outcomes of the children that the task waited for: {id: {"status", "output"}}.
    children_json: Raw = field(name="children", default_factory=_empty)
    #: Whether the task was started before.
    resume: bool
    checkpoint_json: Raw = field(name="checkpoint", default_factory=null)
    #: Results of durable steps by name.
    steps_json: Raw = field(name="steps", default_factory=_empty)
    #: Digests of their arguments by name; null: every call of the step matches.
    step_digests_json: Raw = field(name="step_digests", default_factory=_empty)
    #: {"category", "error"} of the attempt before, if that failed.
    last_error_json: Raw = field(name="last_error", default_factory=null)
    #: Signals that no step has received yet: [{"id", "name", "data", "at"}], in order.
    signals_json: Raw = field(name="signals", default_factory=empty_list)
    #: Earlier attempts, in order.
    attempts: list[PastAttempt] = field(default_factory=list)

    @property
    def claim(self: "Assignment[ClaimedTask]") -> ClaimRef:
        return ClaimRef(self.task.id, self.task.epoch, self.claim_token)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return {name: decoded(json) for name, json in self.inputs_json.items()}

    @cached_property
    def children(self) -> dict[str, Child]:
        return {
            name: Child(name, child["status"], child["output"])
            for name, child in decoded(self.children_json).items()
        }

    @property
    def checkpoint(self) -> Any:
        return decoded(self.checkpoint_json)

    @cached_property
    def steps(self) -> dict[str, bytes]:
        """Results of durable steps by name, as JSON."""
        return {name: bytes(data) for name, data in _steps(self.steps_json).items()}

    @property
    def step_digests(self) -> dict[str, str | None]:
        return _digests(self.step_digests_json)

    @property
    def signals(self) -> Any:
        return decoded(self.signals_json)

    @property
    def last_error(self) -> Any:
        return decoded(self.last_error_json)


def assignments(
    claim: Claim, token_of: Callable[[ClaimedTask], str] = lambda _: ""
) -> list[Assignment[ClaimedTask]]:
    """`token_of` makes the claim token of a claimed task."""
    return [_assignment(task, claim, token_of(task)) for task in claim.tasks]


def _assignment(task: ClaimedTask, claim: Claim, token: str) -> Assignment[ClaimedTask]:
    inputs = {} if bytes(task.inputs) == b"null" else _inputs(task, claim)
    if b'"artifact:' in bytes(task.spec):
        inputs |= _artifacts(task.spec, claim)
    if not task.resume:
        return Assignment(
            task=task,
            claim_token=token,
            model=task.model,
            account=task.account,
            inputs_json=inputs,
            resume=False,
        )
    before = claim.resumed.get(task.id, _NOTHING_BEFORE)
    return Assignment(
        task=task,
        claim_token=token,
        model=task.model,
        account=task.account,
        inputs_json=inputs,
        children_json=Raw(before.children) if before.children else _EMPTY,
        resume=True,
        checkpoint_json=raw(before.checkpoint),
        steps_json=Raw(before.steps) if before.steps else _EMPTY,
        step_digests_json=Raw(before.step_digests) if before.step_digests else _EMPTY,
        last_error_json=raw(before.last_error),
        signals_json=Raw(before.signals) if before.signals else empty_list(),
        attempts=claim.past_attempts.get(task.id, []),
    )


def _inputs(task: ClaimedTask, claim: Claim) -> dict[str, Raw]:
    """Without those that are too large, and parts that an output doesn't have."""
    inputs: dict[str, Raw] = {}
    for name, of in decoded_inputs(task.inputs).items():
        with suppress(KeyError, NoSuchPartError):
            inputs[name] = (
                Raw(msgspec.json.encode([_input(one, claim) for one in of]))
                if isinstance(of, list)
                else _input(of, claim)
            )
    return inputs


def _input(source: Source, claim: Claim) -> Raw:
    if isinstance(source, str):
        return raw(claim.inputs[source])
    if source.value is not UNSET:
        return source.value
    output = claim.inputs[source.task]
    # The agent loads what is in the artifact store, and takes its part (client/large_data.py).
    return raw(output if data_ref_in(output) else part_in(output, source.path))


def part_in(output: bytes | None, path: str) -> bytes:
    """The part of an output, as JSON; raises NoSuchPartError."""
    return msgspec.json.encode(part_of(decoded(raw(output)), path))


def _artifacts(spec: Raw, claim: Claim) -> dict[str, Raw]:
    """The metadata of the artifacts in `context_refs`, by the reference."""
    # Null: it was deleted by hand, after the task had ended and before it was retried.
    return {
        ref: Raw(msgspec.json.encode(claim.artifacts.get(ref[9:])))
        for ref in decoded(spec).get("context_refs", ())
        if ref.startswith("artifact:")
    }
