"""Texts of users that attack: markup, scripts, control characters, directions of text, and sheer size."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any

import pytest
from playwright.async_api import Browser

from lineshaft import Gate, Lineshaft, OutputContract
from lineshaft.operations import agents
from lineshaft.types import NewAgent, NewTask, Rate, RateUnit
from lineshaft.types.json import encode as encoded
from lineshaft.types.reservations import NewReservation, Units
from lineshaft.types.sources import NewSource, SourceKind
from lineshaft.types.work import ClaimRef, Completion, Failure
from tests.dashboard.addresses import page_addresses
from tests.dashboard.conftest import Served, visitor
from tests.dashboard.forms import Person
from tests.dashboard.live_stream import live_stream
from tests.dashboard.sample import Sample, png

HOSTILE = (
    "{{7*7}}<script>window.pwned=1</script>'\"><img src=x onerror=window.pwned=1></textarea></title>"
    "--><!--end of part--><!--part live--></main>\x1b[31m\u202e\\u0000\x7f\u2066%00"
)
KEY = HOSTILE.replace("*", "")
_LONG = HOSTILE + "<b>" * 350_000
#: Names and values of fields, and texts to be edited.
_FIELDS = re.compile(r' (?:name|value)="[^"]*"|(?s:<textarea.*?</textarea>)')
#: As `printable` replaces them; line ends and tabs are all right.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_MOST_BYTES = 1 << 20
#: Parts of a page that change while it is open.
_PARTS = 3


@pytest.fixture
async def sample(served: Served) -> AsyncIterator[Sample]:
    async with Lineshaft(f"http://127.0.0.1:{served.client.port}") as shaft:
        yield await _attack(shaft)


async def _claimed(shaft: Lineshaft, agent_id: str, type_: str) -> ClaimRef:
    new = NewAgent(
        id=agent_id,
        instance=HOSTILE,
        host=HOSTILE,
        version=HOSTILE[:100],
        type=HOSTILE,
        capabilities=(HOSTILE,),
        models_available=(HOSTILE,),
        claim_ttl_sec=3600,
        max_concurrent_tasks=10,
    )
    agent = await shaft.backend.call(agents.register_agent, agents.RegisterAgent(agent=new))
    (found,) = await shaft.backend.claim(agent_id, agent.own.incarnation, limit=1, types=[type_])
    return ClaimRef(found.task.id, found.task.epoch, found.claim_token)


def _task(type_: str, **fields: Any) -> NewTask:
    return NewTask(type=type_, title=HOSTILE, spec={HOSTILE: _LONG}, tags=[HOSTILE], max_attempts=1, **fields)


async def _attack(shaft: Lineshaft) -> Sample:
    """Everything that a caller can name or write, hostile."""
    agent = HOSTILE[:200]
    gate = OutputContract(validation=[Gate("human", {"ask": HOSTILE, "instructions": HOSTILE})])
    schema = {
        "type": "object",
        "properties": {HOSTILE: {"type": "string", "title": HOSTILE, "description": _LONG[:10_000]}},
    }
    dag = await shaft.submit_dag(
        HOSTILE,
        [
            _task(f"{HOSTILE} done", key="done", created_by=f"human:{HOSTILE}"),
            _task(f"{HOSTILE} next", key=HOSTILE, depends_on=["done"], lock_key=HOSTILE),
        ],
        created_by=f"human:{HOSTILE}",
    )
    completed = dag.tasks["done"].id
    report = {"summary": HOSTILE, "decisions": [{"what": HOSTILE, "why": HOSTILE * 20}], HOSTILE: [HOSTILE]}
    claim = await _claimed(shaft, agent, f"{HOSTILE} done")
    output = {"text": _LONG, HOSTILE: HOSTILE}
    moved = await shaft.backend.complete(
        [Completion(claim, encoded(output), encoded([HOSTILE]), encoded(report))]
    )
    assert moved[0].error is None, moved
    running = await _claimed(shaft, agent, f"{HOSTILE} next")
    await shaft.set_quota("hostile", KEY, rate=Rate(9, RateUnit.TOKENS, 60), reason=HOSTILE)
    await shaft.backend.acquire(NewReservation(running, KEY, Units(tokens=1)), wait_sec=0)
    dead = running
    for number in range(2):
        await shaft.submit(_task(HOSTILE, lock_key=f"{HOSTILE} {number}"))
        dead = await _claimed(shaft, agent, HOSTILE)
        trace = f"Traceback (most recent call last):\n  File {HOSTILE}\n{HOSTILE}: {_LONG}"
        await shaft.backend.fail([Failure(dead, f"{HOSTILE} {_LONG}", HOSTILE, traceback=trace)])
    await shaft.submit(_task("asked", output=gate))
    asked = await _claimed(shaft, agent, "asked")
    await shaft.backend.complete([Completion(asked, encoded(output))])
    waiting = await shaft.submit(_task(f"{HOSTILE} wait", lock_key=HOSTILE))
    person = await shaft.submit(
        _task(
            "person",
            required_capabilities=["human"],
            output=OutputContract(validation="json-schema", validation_schema=schema),
        )
    )
    await shaft.artifacts.put(HOSTILE[:200], _LONG.encode(), content_type="text/plain", task=completed)
    picture = await shaft.artifacts.put("<img src=x onerror=window.pwned=1>.png", png(4, 4), task=completed)
    source = NewSource(
        name="hostile",
        kind=SourceKind.SCHEDULE,
        cron="0 9 * * 1",
        template={"task": {"type": HOSTILE, "title": HOSTILE, "spec": {HOSTILE: _LONG[:10_000]}}},
    )
    await shaft.sources.put(source)
    await shaft.sources.fire("hostile", {HOSTILE: HOSTILE})
    await shaft.pause(HOSTILE, reason=HOSTILE)
    await shaft.open_breaker(f"{HOSTILE} wait", reason=HOSTILE)
    groups = await shaft.dead_letter_groups()
    return Sample(
        dag=dag.id,
        completed=completed,
        dead=dead.id,
        to_approve=asked.id,
        for_person=person.id,
        running=running.id,
        locked=waiting.id,
        picture=picture.id,
        pattern=groups[0].pattern,
        agent=agent,
        source="hostile",
        quota="hostile",
    )


class _Markup(HTMLParser):
    """Finds what only an attack can have put into a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "script" and not (given.get("src") or "").startswith("/static/"):
            self.faults.append(f"a script: {given}")
        if tag == "img" and not (given.get("src") or "").startswith("/tasks/"):
            self.faults.append(f"a picture: {given}")
        self.faults += [f"{tag} has {name}" for name in given if name.startswith("on") or name == "style"]
        for name in ("href", "action", "src"):
            if (address := given.get(name) or "/")[:1] not in {"/", "#", "?"} or address.startswith("//"):
                self.faults.append(f"{tag} leads to {address[:100]}")


def _faults(page: str) -> list[str]:
    markup = _Markup()
    markup.feed(page)
    # What a form sends is as it was.
    page = _FIELDS.sub("", page)
    faults = markup.faults
    if len(page.encode()) > _MOST_BYTES:
        faults.append(f"{len(page):,} characters")
    if found := _UNSAFE.search(page):
        at = found.start()
        faults.append(f"a raw {found[0]!r} in {page[max(0, at - 150) : at + 50]!r}")
    counts = {tag: markup.tags.count(tag) for tag in ("html", "head", "body", "main")}
    counts |= {text: page.count(text) for text in ('<nav class="side"', "</html>")}
    faults += [f"{count} times {what}" for what, count in counts.items() if count != 1]
    if page.count("<!--part ") != _PARTS or page.count("<!--end of part-->") != _PARTS:
        faults.append("its live parts are broken")
    return faults


@pytest.mark.slow("opens every page")
async def test_hostile_texts_are_shown_as_text_on_every_page(served: Served, sample: Sample) -> None:
    person = Person(served)
    faults: list[str] = []
    shown = 0
    pages = [
        *page_addresses(sample),
        "/tasks?q=%3Cscript%3Ewindow.pwned%3D1%3C%2Fscript%3E%E2%80%AE%1B",
        "/dags?q=%3Cscript%3Ewindow.pwned%3D1%3C%2Fscript%3E%E2%80%AE%1B",
        "/new?title=%3C%2Ftextarea%3E%3Cscript%3E&spec=%3C%2Ftextarea%3E%E2%80%AE",
    ]
    for address in pages:
        page = await person.page(address)
        faults += [f"{address}: {fault}" for fault in _faults(page)]
        shown += "{{7*7}}" in page
        if " data-live" not in page:
            continue
        async with asyncio.timeout(60), live_stream(served, address, person.cookies) as stream:
            event = await stream.event()
        assert event["event"] == "page", address
        if _UNSAFE.search(_FIELDS.sub("", json.loads(event["data"])["live"])):
            faults.append(f"{address}: raw characters in its stream")
    assert not faults, "\n".join(faults)
    assert shown > len(pages) / 2


@pytest.mark.slow("each page is opened in a browser")
async def test_no_hostile_text_runs_in_a_browser(browser: Browser, served: Served, sample: Sample) -> None:
    tab = await visitor(browser, served, viewport={"width": 400, "height": 800})
    faults = []
    for address in page_addresses(sample):
        page = await tab.open(address)
        if await page.evaluate("window.pwned"):
            faults.append(f"{address}: a script ran")
        if "Lineshaft" not in await page.title():
            faults.append(f"{address}: its title is {await page.title()!r}")
        wide = await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        if wide > 0:
            faults.append(f"{address}: {wide} px too wide")
    await tab.context.close()
    faults += tab.faults
    assert not faults, "\n".join(faults)
