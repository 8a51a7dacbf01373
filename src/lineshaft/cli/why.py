"""What a task is waiting for or doing, in words."""

from typing import TYPE_CHECKING

from lineshaft.cli.output import id_for_people, print_facts, print_text

if TYPE_CHECKING:
    from lineshaft.types import Why

_RUNNABLE = "The next free agent claims it in order of priority."


def print_why(why: "Why") -> None:
    name = id_for_people(why.task_id)
    if why.runnable:
        print_text(f"{name} is {why.status} and runnable. {_RUNNABLE}")
    else:
        print(f"{name} is {why.status}.")
    print_facts([(reason.code, reason.detail) for reason in why.reasons])


def summary(why: "Why") -> str:
    """The same in one line."""
    details = " ".join(reason.detail for reason in why.reasons)
    return f"it is {why.status}. {_RUNNABLE if why.runnable else details}".rstrip()
