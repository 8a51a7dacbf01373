"""An output at one of its gates."""

from typing import NamedTuple

import msgspec
from msgspec import Struct

from lineshaft.checks.verdict import CandidateOutput
from lineshaft.model.tasks import Gate
from lineshaft.types.work import ClaimRef

GATES = msgspec.json.Decoder(tuple[Gate, ...])
#: The parts of an output.
PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RunKey(NamedTuple):
    """One run of a gate that costs money."""

    id: str
    epoch: int
    gate_no: int
    run: int


class GatedOutput(Struct, frozen=True):
    """An output at one of its gates."""

    id: str
    epoch: int
    gate_no: int
    #: The method of the gate that it waits for; None: its agent still holds it.
    gate: str | None
    type: str
    title: str
    spec: bytes
    gates: bytes | None
    require_decision_report: bool
    output: bytes
    #: How often validators have started this gate.
    gate_runs: int = 0
    #: Money is reserved for this run.
    is_paid: bool = False
    #: The output with its data, if that is stored as an artifact.
    whole: bytes | None = None
    #: Why checks can't have that data.
    fault: str | None = None

    @property
    def claim(self) -> ClaimRef:
        return ClaimRef(self.id, self.epoch)

    @property
    def run(self) -> RunKey | None:
        """The run that money is reserved for; None: there is none."""
        return RunKey(self.id, self.epoch, self.gate_no, self.gate_runs) if self.is_paid else None

    @property
    def all_gates(self) -> tuple[Gate, ...]:
        return GATES.decode(self.gates) if self.gates else ()

    @property
    def data(self) -> bytes:
        return bytes(PARTS.decode(self.output)["data"])

    @property
    def candidate(self) -> CandidateOutput:
        return CandidateOutput(
            self.id, self.epoch, self.type, self.title, self.spec, self.whole or self.output
        )
