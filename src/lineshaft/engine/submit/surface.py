"""New tasks that come over a compatible API, such as OfficePlane's."""

from collections.abc import Mapping
from typing import Any

from lineshaft.model.fields import encoded_json
from lineshaft.model.tasks import NewTask


class SurfaceTask(NewTask, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new task with what its API received and returns unchanged (`Task.surface`)."""

    surface: Mapping[str, Any] | None = None


def stored_surface(task: NewTask, place: str) -> bytes | None:
    if not isinstance(task, SurfaceTask) or task.surface is None:
        return None
    return encoded_json("surface", task.surface, place=place)
