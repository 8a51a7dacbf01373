"""What programs that use queue files do with them, as they are found in the field."""

import json
from pathlib import Path
from typing import Any

QUEUES = ("pending", "in-progress", "completed", "dead-letter", "cancelled", "failed")


def queue(root: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file, in either form."""
    found = json.loads((root / "queue" / f"{name}.json").read_text(encoding="utf-8"))
    listed: list[dict[str, Any]] = found["tasks"] if isinstance(found, dict) else found
    return listed


def put(root: Path, name: str, records: Any) -> Path:
    """Write a file as other programs do, in place."""
    path = root / "queue" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=2), encoding="utf-8")
    return path


def by_id(root: Path, name: str) -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in queue(root, name)}


def places(root: Path) -> dict[str, list[str]]:
    """The files that have each id."""
    found: dict[str, list[str]] = {}
    for name in QUEUES:
        if (root / "queue" / f"{name}.json").exists():
            for record in queue(root, name):
                found.setdefault(record["id"], []).append(name)
    return found


def check_as_readers_do(root: Path) -> None:
    """The rules that other programs rely on."""
    for name in QUEUES:
        whole = json.loads((root / "queue" / f"{name}.json").read_text(encoding="utf-8"))
        # A dashboard counts like this.
        assert isinstance(whole, list), name
        assert len(whole) == len(queue(root, name))
        for record in whole:
            # A scheduler sorts by it.
            assert type(record["priority"]) is int, record
            assert 1 <= record["priority"] <= 10
            # A claimer names files after it.
            assert "/" not in record["id"]
    assert [(name, found) for name, found in places(root).items() if len(found) > 1] == []
    # A completion council refuses to finish while it has entries.
    assert queue(root, "failed") == []
