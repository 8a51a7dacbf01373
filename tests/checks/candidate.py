"""Outputs for checks."""

import json
from typing import Any

from lineshaft.checks.verdict import CandidateOutput


def candidate(
    data: Any = None, *, report: Any = None, artifacts: Any = None, spec: Any = None
) -> CandidateOutput:
    output = {"data": data, "artifacts": artifacts, "decision_report": report}
    return CandidateOutput(
        "task_1", 1, "code", "Write it", json.dumps(spec or {}).encode(), json.dumps(output).encode()
    )
