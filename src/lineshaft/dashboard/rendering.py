"""Templates, and how values are shown in them. Everything that comes from outside is escaped."""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lineshaft import pictures
from lineshaft.model.printable import printable
from lineshaft.model.short_ids import short_id
from lineshaft.pictures import text
from lineshaft.pictures.state_icons import state_symbols

_FOLDER = Path(__file__).parent
#: By name. Pictures bring their own style sheet.
STATIC = {path.name: path for path in (*sorted((_FOLDER / "static").iterdir()), pictures.STYLE_SHEET)}
#: Characters of a value that a page shows; the rest is a download.
MOST_SHOWN = 20_000
#: Characters in the title of a browser's tab.
_MOST_TITLE = 150


@cache
def _environment() -> Environment:
    """One for all dashboards of a process: a template takes much longer to compile than to render."""
    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        shown=shown,
        ago=ago,
        moment=moment,
        usd=usd,
        usd_left=usd_left,
        duration=duration,
        short=short,
        pretty=pretty,
        number=number,
    )
    made.globals.update(
        static=f"/static/{_static_version()}",
        state_symbols=Markup(state_symbols()),  # noqa: S704 - ours
    )
    made.globals["ui"] = made.get_template("macros.html").module
    return made


def _static_version() -> str:
    """Changes with the contents of static files."""
    digest = hashlib.sha256()
    for path in STATIC.values():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def title_of(text: str) -> str:
    """The name of a tab: one line, cut, without control characters."""
    return printable(" ".join(text[: _MOST_TITLE * 4].split()))[:_MOST_TITLE]


def shown(text: object, limit: int = 200) -> Markup:
    """Text of a user: on one line, cut, without control characters, and isolated from the text around it."""
    if text is None:
        return Markup("")
    whole = " ".join(str(text)[: limit * 4 + 1].split())
    cut = whole[: limit - 1] + "…" if len(whole) > limit else whole
    return Markup("<bdi>{}</bdi>").format(printable(cut))


def ago(time: datetime | None) -> Markup:
    """A time that the page's script shows relative to now, and in full on hover."""
    return _time(time, Markup(" data-relative"))


def moment(time: datetime | None) -> Markup:
    """A time that the page's script shows in the chosen time zone."""
    return _time(time, Markup(""))


def _time(time: datetime | None, attribute: Markup) -> Markup:
    if time is None:
        return Markup("")
    utc = time.astimezone(UTC)
    return Markup('<time datetime="{}"{}>{}</time>').format(
        utc.isoformat(timespec="milliseconds"), attribute, utc.strftime("%Y-%m-%d %H:%M:%S UTC")
    )


def usd(amount: Decimal | float | None, none: str = "–") -> str:
    if amount is None:
        return none
    return text.dollars(Decimal(amount)) if amount else "$0.00"


def usd_left(left: Decimal, budget: Decimal) -> str:
    """What is left of a budget, or by how much it is exceeded."""
    return f"over by {usd(-left)}, of {usd(budget)}" if left < 0 else f"{usd(left)} of {usd(budget)} left"


def duration(seconds: float | None) -> str:
    return "–" if seconds is None else text.duration(seconds)


def short(name: str | None) -> Markup:
    """An id as people read it; in full on hover."""
    if not name:
        return Markup("")
    return Markup('<bdi class="id" title="{}">{}</bdi>').format(
        printable(name), printable(short_id(name))[:60]
    )


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}"


def pretty(value: Any, limit: int = MOST_SHOWN) -> str:
    """JSON with indentation; text as it is. Without control characters, cut."""
    if isinstance(value, msgspec.Raw):
        value = msgspec.json.decode(value)
    whole = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if len(whole) > limit:
        return printable(f"{whole[:limit]}\n… ({len(whole):,} characters)")
    return printable(whole)


#: Nothing but the layout writes comments: all other content is escaped.
_PART = re.compile(r"<!--part (\w+)-->(.*?)<!--end of part-->", re.DOTALL)


class Renderer:
    def __init__(self) -> None:
        self._environment = _environment()

    def page(self, template: str, context: Mapping[str, Any]) -> str:
        return self._environment.get_template(template).render(context)

    def parts(self, template: str, context: Mapping[str, Any]) -> dict[str, str]:
        """The parts of a page that change while it is open, as the layout marks them."""
        page = self.page(template, context)
        return dict(_PART.findall(page))
