"""Overview: what needs a person, how work flows, and what does it cost."""

from lineshaft.dashboard.visit import EVERYTHING, Pages, View, Visit

pages = Pages()


@pages.page("/")
async def overview(visit: Visit) -> View:
    stats = await visit.engine.read.stats()
    return View(
        "overview.html",
        "Overview",
        {"stats": stats},
        topics=frozenset({EVERYTHING}),
        at_most_every_sec=2.0,
        refresh_sec=10.0,
    )
