"""Dead letters: groups by like error, lists, and one letter."""

from collections.abc import Sequence
from urllib.parse import urlencode

from msgspec import Struct

from lineshaft.dashboard.command_lines import element_id
from lineshaft.dashboard.spec_compare import MOST_SHOWN, Difference, differences
from lineshaft.dashboard.visit import Pages, Values, View, Visit
from lineshaft.engine.review.dead_letters import MAX_COUNTED
from lineshaft.errors import InvalidInputError
from lineshaft.model.retry import FailureCategory
from lineshaft.model.reviews import Resolution
from lineshaft.types import DeadLetter, DeadLetterFilter
from lineshaft.types.work import SPAWN_STEP

pages = Pages()

#: Groups on the first page.
_GROUPS = 200
#: Letters on a page, which are also those that are compared.
MOST_LETTERS = 50
TOPICS = frozenset({"task.dead_lettered", "task.resolved", "task.cancelled"})


class _Words(Struct, frozen=True):
    """How a resolution is called on buttons and in messages."""

    verb: str
    past: str
    consequence: str
    danger: bool = False


WORDS = {
    Resolution.RETRY: _Words(
        "Retry",
        "Retried",
        "A retried task starts again with all its attempts. Recorded steps are kept, unless you forget them.",
    ),
    Resolution.MODIFY_AND_RETRY: _Words(
        "Change and retry",
        "Changed and retried",
        "The spec is changed, and the task starts again with all its attempts.",
    ),
    Resolution.CANCEL: _Words(
        "Cancel",
        "Cancelled",
        "A cancelled task never runs, and the tasks that depend on it are cancelled too.",
        danger=True,
    ),
    Resolution.DELETE: _Words(
        "Delete",
        "Deleted",
        "A deleted dead letter disappears from lists, and its task is cancelled with all that depend on it.",
        danger=True,
    ),
    Resolution.ESCALATE: _Words(
        "Escalate",
        "Escalated",
        "An escalated task stays a dead letter, and an alert asks another person to decide.",
    ),
}


class LetterSelection(Struct, frozen=True):
    """The letters that a decision is about: a selection, all with one error, or all escalated ones."""

    task_ids: tuple[str, ...] = ()
    pattern: str = ""
    is_escalated: bool = False
    types: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Values) -> "LetterSelection":
        chosen = tuple(values.all("task"))
        if chosen:
            return cls(task_ids=chosen)
        if values.get("escalated"):
            return cls(is_escalated=True)
        return cls(
            pattern=values.get("pattern"),
            types=tuple(values.all("type")),
            categories=tuple(values.all("category")),
        )

    @property
    def filter(self) -> DeadLetterFilter:
        if self.task_ids:
            return DeadLetterFilter(task_ids=self.task_ids)
        # Escalated letters are in no group.
        if self.is_escalated:
            return DeadLetterFilter(resolution=Resolution.ESCALATE)
        return DeadLetterFilter(
            reviewed=False, pattern=self.pattern, type=self.types, category=self.categories
        )

    @property
    def fields(self) -> list[tuple[str, str]]:
        """As fields of a form or a query."""
        return [
            *(("task", name) for name in self.task_ids),
            *((("pattern", self.pattern),) if self.pattern else ()),
            *((("escalated", "yes"),) if self.is_escalated else ()),
            *(("type", name) for name in self.types),
            *(("category", name) for name in self.categories),
        ]

    @property
    def query(self) -> str:
        return urlencode(self.fields)

    @property
    def without_filter(self) -> "LetterSelection":
        return LetterSelection(pattern=self.pattern)

    @property
    def page(self) -> str:
        """Where these letters are listed."""
        if self.is_escalated:
            return "/dead-letters?tab=escalated"
        return f"/dead-letters/group?{self.query}" if self.pattern else "/dead-letters"

    @property
    def title(self) -> str:
        if self.is_escalated:
            return "escalated dead letters"
        return "dead letters with one error" if self.pattern else "chosen dead letters"


# The list.


@pages.page("/dead-letters")
async def groups(visit: Visit) -> View:
    tab = visit.query.get("tab", "open")
    if tab in {"escalated", "decided"}:
        return await _listed(visit, tab)
    types, categories = visit.query.all("type"), visit.query.all("category")
    letters = visit.engine.dead_letters
    found = await letters.groups(types=types, categories=categories, limit=_GROUPS)
    recent = await letters.recent([group.pattern for group in found], types=types, categories=categories)
    if visit.query.get("order") == "newest":
        found.sort(key=lambda group: group.last_at, reverse=True)
    known = await letters.groups(limit=_GROUPS) if types or categories else found
    rows = []
    for group in found:
        same = LetterSelection(pattern=group.pattern, types=tuple(types), categories=tuple(categories))
        rows.append((group, element_id(group.pattern), same.page, recent[group.pattern]))
    context = {
        "groups": rows,
        "total": sum(group.count for group in found),
        "most_groups": _GROUPS,
        "types": sorted({name for group in known for name in group.types} | {*types}),
        "categories": sorted({*FailureCategory} | {*categories}),
        "chosen_type": visit.query.get("type"),
        "chosen_category": visit.query.get("category"),
        "tab": "open",
    }
    return View(
        "dead_letters.html", "Dead letters", context, topics=TOPICS, at_most_every_sec=2.0, refresh_sec=300.0
    )


async def _listed(visit: Visit, tab: str) -> View:
    """Letters that a person has decided about, newest first."""
    letters = visit.engine.dead_letters
    escalated = LetterSelection(is_escalated=True)
    shown = escalated.filter if tab == "escalated" else DeadLetterFilter(reviewed=True)
    page = await letters.find(shown, limit=MOST_LETTERS, cursor=visit.query.get("cursor") or None)
    context = {
        "letters": page.items,
        "next_cursor": page.next_cursor,
        "tab": tab,
        "wanted": escalated,
        "count": await letters.count_open(escalated.filter) if tab == "escalated" else 0,
        "most_counted": MAX_COUNTED,
        # Escalating them again would change nothing.
        "words": {name: word for name, word in WORDS.items() if name is not Resolution.ESCALATE},
    }
    return View("dead_letters_decided.html", "Dead letters", context, topics=TOPICS, at_most_every_sec=2.0)


@pages.page("/dead-letters/group")
async def group(visit: Visit) -> View:
    wanted = LetterSelection.of(visit.query)
    if not wanted.pattern:
        raise InvalidInputError(
            errors=[("pattern", "is required: open a group from the list of dead letters")]
        )
    letters = visit.engine.dead_letters
    page = await letters.find(wanted.filter, limit=MOST_LETTERS, cursor=visit.query.get("cursor") or None)
    context = {
        "wanted": wanted,
        "count": await letters.count_open(wanted.filter),
        "most_counted": MAX_COUNTED,
        "letters": page.items,
        "next_cursor": page.next_cursor,
        "differences": _differences(page.items)[:MOST_SHOWN],
        "words": WORDS,
    }
    return View(
        "dead_letter_group.html",
        "Dead letters with one error",
        context,
        topics=TOPICS,
        at_most_every_sec=2.0,
    )


def _differences(letters: Sequence[DeadLetter]) -> list[Difference]:
    """What differs between the tasks, and between their last attempts."""
    described = []
    for letter in letters:
        last = letter.failure_history[-1] if letter.failure_history else None
        described.append(
            {
                "type": letter.type,
                "category": letter.category,
                "agent": last and last.agent,
                "version of the agent": last and last.version,
                "spec": letter.spec,
            }
        )
    return differences(described)


# One letter.


@pages.page("/dead-letters/{task_id}")
async def letter(visit: Visit) -> View:
    return await letter_view(visit)


async def letter_view(visit: Visit) -> View:
    task_id = visit.path["task_id"]
    found = await visit.engine.dead_letters.get(task_id)
    context = {
        "letter": found,
        "steps": await steps_of(visit, task_id),
        "words": WORDS,
        "is_open": is_open(found),
        "group_address": LetterSelection(pattern=found.pattern).page,
    }
    return View(
        "dead_letter.html", f"Dead letter {found.title}", context, topics=frozenset({f"task:{task_id}"})
    )


def is_open(letter: DeadLetter) -> bool:
    """Whether a decision is still wanted; an escalated letter wants another one."""
    waiting = letter.resolution in {None, Resolution.ESCALATE}
    return waiting and letter.status == "DEAD_LETTERED"


async def steps_of(visit: Visit, task_id: str) -> list[str]:
    return [name for name in await visit.engine.read.steps(task_id) if not name.startswith(SPAWN_STEP)]
