"""Artifacts: files that tasks read and write."""

from datetime import datetime

from msgspec import Struct
from msgspec.structs import asdict

#: Starts a reference to an artifact in `spec.context_refs`, `output.artifacts` and `data_ref`.
REF_PREFIX = "artifact:"


class Artifact(Struct, frozen=True, kw_only=True):
    """A stored file, without its content."""

    id: str
    #: How tasks refer to it: `artifact:ID`.
    ref: str
    #: As its uploader gave it. Don't use it as a path.
    name: str
    size: int
    sha256: str
    content_type: str
    #: The task that made it.
    task_id: str | None
    created_at: datetime


class InputArtifact(Artifact, frozen=True, kw_only=True):
    """An artifact as a task gets it in its inputs."""

    #: The path of its content on the server.
    url: str

    @classmethod
    def of(cls, artifact: Artifact) -> "InputArtifact":
        return cls(**asdict(artifact), url=f"/v1/artifacts/{artifact.id}/content")


def artifact_id(ref: str) -> str:
    """The id in a reference; an id is one too."""
    return ref.removeprefix(REF_PREFIX)
