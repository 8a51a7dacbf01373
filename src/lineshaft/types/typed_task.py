"""A new task that knows what its handler returns."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, Self, TypeVar, Unpack, cast

from lineshaft.model.tasks import NewTask, TaskOptions

R_co = TypeVar("R_co", covariant=True)

#: From the JSON of an output to the value that the handler returned.
Decode = Callable[[bytes], Any]

_DECODE = "decode"


class TypedTask(NewTask, Generic[R_co], frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A `NewTask` made by `TaskType.new`: `TaskHandle.result` returns what the handler returned."""

    @classmethod
    def returning(cls, decode: Decode | None, task_type: str, **fields: Any) -> Self:
        task = cls(task_type, **fields)
        # Not a field: fields are sent to the server.
        task.__dict__[_DECODE] = decode
        return task

    def as_input(self) -> R_co:
        """The output of this task as an argument for another one in the same call: `TaskType.new` takes it.

            notes = research.new("competitors").with_options(key="research")
            await shaft.submit_dag("Page", [notes, implement.new(notes=notes.as_input())])

        The task needs a key. Its output arrives when it exists, as the parameter's type.
        """
        return cast("R_co", self)

    def with_options(self, **options: Unpack[TaskOptions]) -> Self:
        """Return a copy with these fields."""
        copy = super().with_options(**options)
        copy.__dict__.update(self.__dict__)
        return copy


def decoder_of(task: NewTask) -> Decode | None:
    """None: the output has the types of JSON."""
    return task.__dict__.get(_DECODE) if isinstance(task, TypedTask) else None


def check_new_tasks(tasks: Iterable[object]) -> None:
    """Raise TypeError for anything that isn't a new task, such as a handler without `.new(…)`."""
    if isinstance(tasks, str | NewTask):
        raise TypeError(f"Expected a list of tasks, got a {type(tasks).__name__}. Write [task, …].")
    for task in tasks:
        if not isinstance(task, NewTask):
            raise TypeError(f"Expected a NewTask, got {_instead(task)}")


def _instead(task: object) -> str:
    """What was given, and the right form."""
    if isinstance(task, str):
        return f"{task!r}. Write NewTask({task!r}, spec={{…}}), or HANDLER.new(…) for a handler in Python."
    if isinstance(task, Coroutine):
        name = getattr(task, "__name__", "HANDLER")
        task.close()
        return f"a call of {name}. Write {name}.new(…): it builds a task instead of running the handler."
    if hasattr(task, "new"):
        return f"{task!r}. Write {getattr(task, '__name__', 'HANDLER')}.new(…) to build a task for it."
    return f"{task!r}. Write HANDLER.new(…), or NewTask('type', spec={{…}})."
