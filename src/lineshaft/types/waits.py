"""Waiting without a slot: sleeps and waits for signals, each a step of a running task."""

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from lineshaft.errors import InvalidInputError, LineshaftError
from lineshaft.model.fields import LONGEST_SECONDS
from lineshaft.model.retry import number_fault, raise_faults
from lineshaft.model.storable import check_json, check_storable, readable_json
from lineshaft.types.work import UNREPORTED, ClaimRef, Spent, check_step_name

MAX_SIGNAL_BYTES = 64 << 10
#: Signals to one task that it hasn't received yet.
MAX_SIGNALS = 1_000
_MAX_KEY = 1_000


class Signal(Struct, frozen=True):
    """A signal as its task receives it."""

    id: str
    name: str
    data: Any
    at: datetime


class WaitEnd(Struct, frozen=True):
    """How a wait ended. The step of the wait records this."""

    #: When it was to end at the latest; None: never without the signal.
    until: datetime | None
    #: What it waited for. None: its time was over.
    signal: Signal | None = None

    @property
    def json(self) -> bytes:
        return msgspec.json.encode(self)


class NewSuspension(Struct, frozen=True):
    """A running task sleeps or waits for a signal, and holds nothing meanwhile."""

    claim: ClaimRef
    #: Of the step that records how the wait ended.
    name: str
    #: None: it only sleeps.
    signal: str | None = None
    #: The wait ends after so long, or at this instant, at the latest. One that has begun keeps its end.
    timeout_sec: float | None = None
    until: datetime | None = None
    #: Saved in the same transaction, as JSON.
    checkpoint: bytes | None = None
    spent: Spent = UNREPORTED

    def __post_init__(self) -> None:
        # Checked here, so that one invalid item is rejected alone and not with the whole call.
        check_step_name("name", self.name)
        if self.signal is not None:
            check_step_name("signal", self.signal)
        if self.timeout_sec is not None:
            raise_faults({"timeout_sec": number_fault(self.timeout_sec, 0, LONGEST_SECONDS)})
        if self.timeout_sec is not None and self.until is not None:
            raise InvalidInputError(errors=[("until", "can't be given together with timeout_sec")])
        if self.signal is None and self.timeout_sec is None and self.until is None:
            raise InvalidInputError(errors=[("until", "is missing: a wait without a signal needs an end")])
        check_json(checkpoint=self.checkpoint)


class Suspended(Struct, frozen=True):
    """The result of one suspension."""

    id: str
    #: How the wait has ended. None: the claim is over, and the task is claimed again at its end.
    end: WaitEnd | None = None
    until: datetime | None = None
    error: LineshaftError | None = None

    def unwrap(self) -> WaitEnd | None:
        if self.error is not None:
            raise self.error
        return self.end


class NewSignal(Struct, frozen=True):
    name: str
    #: As JSON.
    data: bytes = b"null"
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        check_step_name("name", self.name)
        if len(self.data) > MAX_SIGNAL_BYTES:
            fault = (
                f"must be at most {MAX_SIGNAL_BYTES} bytes of JSON, got {len(self.data)}; store the rest as "
                "an artifact and send its reference"
            )
            raise InvalidInputError(errors=[("data", fault)])
        check_json(data=readable_json("data", self.data))
        if self.idempotency_key is not None:
            check_storable(idempotency_key=self.idempotency_key)
            if not 1 <= len(self.idempotency_key) <= _MAX_KEY:
                fault = f"must be a text of 1 to {_MAX_KEY} characters"
                raise InvalidInputError(errors=[("idempotency_key", fault)])


class SentSignal(Struct, frozen=True, omit_defaults=True):
    id: str
    task_id: str
    name: str
    at: datetime
    #: A signal with this idempotency key had been sent before: nothing was sent.
    duplicate: bool = False


class TaskSignal(Struct, frozen=True):
    """A signal for people: without its data."""

    id: str
    name: str
    at: datetime
    received_at: datetime | None
    sender: str | None
