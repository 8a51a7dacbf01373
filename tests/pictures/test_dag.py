"""The picture of a DAG: what it shows, that it is well formed, and what of it changes."""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib.resources import files
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import CycleError
from lineshaft.model.states import Status
from lineshaft.pictures import DagPicture, dag_svg
from lineshaft.pictures.nodes import DagNode, Group, critical_path
from lineshaft.pictures.state_colours import css_variables
from lineshaft.pictures.state_icons import PERSON, state_icon, state_symbols
from tests.pictures.graphs import edges, hostile_texts, node, nodes, patient, structures

SVG = "{http://www.w3.org/2000/svg}"
DIAMOND = [
    node("a", title="Plan", type="plan", status=Status.COMPLETED, duration_sec=125, cost_usd=Decimal("1.5")),
    node("b", title="Write", status=Status.RUNNING, duration_sec=0.25, progress=0.5),
    node("c", title="Check", status=Status.VALIDATING, by_person=True),
    node("d", title="Release", type="deploy"),
]
ITS_EDGES = edges(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
#: The elements of a picture.
KNOWN = {
    *("svg", "title", "desc", "style", "defs", "symbol", "marker", "clipPath"),
    *("g", "a", "rect", "use", "text", "path", "circle"),
}


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - our own output


def groups(svg: ET.Element) -> dict[str, ET.Element]:
    found = {g.get("data-task") or g.get("data-group") or "": g for g in svg.iter(f"{SVG}g")}
    assert "" not in found
    return found


def texts(box: ET.Element) -> list[str]:
    return [text.text or "" for text in box.iter(f"{SVG}text")]


def icon(box: ET.Element) -> str | None:
    (use,) = box.iter(f"{SVG}use")
    return use.get("href")


def classes(element: ET.Element) -> set[str]:
    return set((element.get("class") or "").split())


def test_a_box_shows_state_title_type_duration_cost_and_progress() -> None:
    svg = parsed(dag_svg(DIAMOND, ITS_EDGES, title="Landing page"))
    boxes = groups(svg)
    assert texts(boxes["task_a"]) == ["Plan", "plan · 2 min 5 s · $1.50"]
    assert texts(boxes["task_b"]) == ["Write", "code · 250 ms"]
    assert texts(boxes["task_d"]) == ["Release", "deploy"]
    assert icon(boxes["task_a"]) == "#state-COMPLETED"
    assert icon(boxes["task_c"]) == f"#state-{PERSON}"
    assert {"node", "state-COMPLETED"} <= classes(boxes["task_a"])
    assert "waiting" in classes(boxes["task_d"])
    assert "waiting" not in classes(boxes["task_b"])
    track, bar = (r for r in boxes["task_b"].iter(f"{SVG}rect") if classes(r) & {"track", "bar"})
    assert float(bar.get("width") or 0) == pytest.approx(float(track.get("width") or 0) / 2)
    assert svg.findtext(f"{SVG}title") == "Landing page"
    assert svg.findtext(f"{SVG}desc") == "4 tasks: 1 PENDING, 1 RUNNING, 1 VALIDATING, 1 COMPLETED."
    assert svg.get("role") == "img"


def test_each_icon_of_a_file_is_in_it() -> None:
    every = [node(status, status=status) for status in Status]
    every.append(node("person", status=Status.VALIDATING, by_person=True))
    svg = parsed(dag_svg(every, [], title="x"))
    used = {icon(box) for box in groups(svg).values()}
    assert used == {f"#{symbol.get('id')}" for symbol in svg.iter(f"{SVG}symbol")}
    shapes = {ET.tostring(symbol).split(b">", 1)[1] for symbol in svg.iter(f"{SVG}symbol")}
    assert len(shapes) == len(Status) + 1
    assert "#" not in state_symbols().replace("#state-", "")  # no colours
    assert state_icon(Status.READY) in state_icon(Status.READY, by_person=True)


def test_a_picture_in_a_page_has_no_style_of_its_own() -> None:
    svg = dag_svg(DIAMOND, ITS_EDGES, title="x", standalone=False, link=lambda box: f"/tasks/{box.id}?a&b")
    assert "style" not in re.sub(r'data-\w+="[^"]*"', "", svg)
    assert "<symbol" not in svg
    root = parsed(svg)
    assert [a.get("href") for a in root.iter(f"{SVG}a")] == [f"/tasks/{n.id}?a&b" for n in DIAMOND]
    assert root.get("role") == "group"


def test_the_style_sheet_uses_variables_that_exist_and_a_file_has_their_values() -> None:
    sheet = files("lineshaft.pictures").joinpath("dag.css").read_text(encoding="utf-8")
    assert set(re.findall(r"var\((.*?)\)", sheet)) <= set(css_variables(dark=False))
    assert {f"state-{status}" for status in Status} <= set(re.findall(r"\.(state-[A-Z_]+) \{", sheet))
    style = parsed(dag_svg([], [], title="x")).findtext(f"{SVG}style") or ""
    assert "var(" not in style
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    assert css_variables(dark=False)["--state-READY"] in light
    assert css_variables(dark=True)["--state-READY"] in dark


def test_the_critical_path_is_thick() -> None:
    svg = parsed(dag_svg(DIAMOND, ITS_EDGES, title="x"))
    boxes = groups(svg)
    assert [name for name, box in boxes.items() if "critical" in classes(box)] == [
        "task_a",
        "task_b",
        "task_d",
    ]
    paths = {path.get("id"): path for path in svg.iter(f"{SVG}path") if path.get("id")}
    assert {name for name, path in paths.items() if "critical" in classes(path)} == {
        "edge-task_a-task_b",
        "edge-task_b-task_d",
    }
    assert classes(paths["edge-task_a-task_c"]) == {"edge", "done"}
    assert classes(paths["edge-task_c-task_d"]) == {"edge"}


def test_a_picture_without_dependencies_has_no_critical_path() -> None:
    assert DagPicture([node(1), node(2)], []).critical == []


def test_durations_decide_about_the_critical_path() -> None:
    done, running = Status.COMPLETED, Status.RUNNING
    known = [
        node("start", status=done, duration_sec=1),
        node("short", type="x", status=done, duration_sec=2),
        node("long", type="y", status=done, duration_sec=60),
        node("next x", type="x"),
        node("next y", type="y"),
        node("end"),
    ]
    its_edges = edges(
        *(("start", name) for name in ("short", "long", "next x", "next y")),
        *((name, "end") for name in ("short", "long", "next x", "next y")),
    )
    assert critical_path(known, its_edges) == ["task_start", "task_long", "task_end"]
    # A running task counts with the mean of its type, until it takes longer.
    known[3] = node("next x", type="x", status=running, duration_sec=59)
    assert critical_path(known, its_edges)[1] == "task_long"
    known[3] = node("next x", type="x", status=running, duration_sec=61)
    assert critical_path(known, its_edges)[1] == "task_next x"


def test_live_changes_replace_only_the_elements_that_differ() -> None:
    before = DagPicture(DIAMOND, ITS_EDGES).fragments()
    later = [*DIAMOND[:1], node("b", title="Write", status=Status.COMPLETED, duration_sec=2), *DIAMOND[2:]]
    after = DagPicture(later, ITS_EDGES).fragments()
    assert list(before) == list(after)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"node-task_b"}
    svg = DagPicture(later, ITS_EDGES).svg(title="x", standalone=False)
    assert all(markup in svg for markup in after.values())


@patient(max_examples=40)
@given(st.data())
def test_hostile_text_stays_text(data: st.DataObject) -> None:
    boxes, pairs = data.draw(structures(4))
    drawn = data.draw(nodes(boxes))
    title = data.draw(hostile_texts)
    for standalone in (True, False):
        svg = dag_svg(
            drawn, edges(*pairs), title=title, standalone=standalone, link=lambda box: box.title[:99]
        )
        assert len(svg) < 30_000
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", svg)
        root = parsed(svg)
        assert set(groups(root)) == {item.id for item in drawn}
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= KNOWN
        assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)


def test_a_long_title_is_cut_and_whole_in_the_tooltip() -> None:
    title = "Write the documentation of everything that this project will ever have"
    svg = parsed(dag_svg([node(1, title=title, type="t" * 50, duration_sec=61)], [], title="x"))
    box = groups(svg)["task_1"]
    shown, meta = texts(box)
    assert (shown[-1], title.startswith(shown[:-1])) == ("…", True)
    assert meta.endswith("… · 1 min 1 s")
    assert (box.findtext(f"{SVG}title") or "").startswith(title + "\n")


def test_a_cycle_is_an_error_and_unknown_tasks_are_left_out() -> None:
    with pytest.raises(CycleError):
        dag_svg([node(1), node(2)], edges((1, 2), (2, 1)), title="x")
    alone = parsed(dag_svg([node(1)], edges((0, 1), (1, 2)), title="x"))
    assert list(groups(alone)) == ["task_1"]


def test_any_id_makes_an_element_of_its_own() -> None:
    names = ["", "a b", "a-b", "a.b", "\ud800", "x" * 1_000, "x" * 999, "<&"]
    picture = DagPicture([node(name) for name in names], edges(("a", "a-b"), ("a b", "a-b")))
    svg = parsed(picture.svg(title="x"))
    assert len(picture.fragments()) == len(names) + 1
    assert len({g.get("id") for g in svg.iter(f"{SVG}g")}) == len(names)


def a_large_dag(branches: int) -> tuple[list[DagNode], list[tuple[str, str]]]:
    """A start, branches of two tasks each, an end."""
    tasks = [node("start", type="split"), node("end", type="join")]
    pairs: list[tuple[object, object]] = []
    for number in range(branches):
        status = Status.COMPLETED if number else Status.DEAD_LETTERED
        tasks.append(node(f"a{number}", type="scrape", status=status, cost_usd=Decimal("0.01")))
        tasks.append(node(f"b{number}", type="sum up"))
        pairs += [("start", f"a{number}"), (f"a{number}", f"b{number}"), (f"b{number}", "end")]
    return tasks, edges(*pairs)


def test_many_alike_tasks_are_one_group_with_a_bar_of_states() -> None:
    tasks, pairs = a_large_dag(200)
    picture = DagPicture(tasks, pairs)
    assert [box.title for box in picture.boxes] == [
        "Title of start",
        "Title of end",
        "scrape ×200",
        "sum up ×200",
    ]
    assert picture.edges == [
        ("task_start", "group_task_a0"),
        ("group_task_a0", "group_task_b0"),
        ("group_task_b0", "task_end"),
    ]
    svg = parsed(picture.svg(title="x"))
    box = groups(svg)["group_task_a0"]
    assert {"group", "state-DEAD_LETTERED"} <= classes(box)
    assert texts(box) == ["scrape ×200", "199 done · 1 dead · $2.00"]
    bars = [bar for bar in box.iter(f"{SVG}rect") if "bar" in classes(bar)]
    assert [sorted(classes(bar)) for bar in bars] == [
        ["bar", "state-COMPLETED"],
        ["bar", "state-DEAD_LETTERED"],
    ]
    assert svg.findtext(f"{SVG}desc", "").startswith("402 tasks: ")


def test_a_task_with_a_list_stands_for_its_children() -> None:
    """The bar has the share of each state; children that aren't drawn count."""
    items = {Status.COMPLETED: 3, Status.RUNNING: 1}
    tasks = [node("scan"), node("review", title="review ×4", status=Status.RUNNING, items=items)]
    svg = dag_svg(tasks, edges(("scan", "review")), title="x")
    assert "3 done · 1 running" in svg
    assert 'class="node state-RUNNING group' in svg
    assert 'width="171.0"/><rect class="bar state-RUNNING"' in svg
    assert parsed(svg).findtext(f"{SVG}desc", "") == "5 tasks: 1 PENDING, 1 RUNNING, 3 COMPLETED."


def test_groups_on_request() -> None:
    tasks, pairs = a_large_dag(200)
    assert len(DagPicture(tasks, pairs, collapse=False).boxes) == 402
    opened = DagPicture(tasks, pairs, expanded=["group_task_a0"])
    assert sum(isinstance(box, Group) for box in opened.boxes) == 1
    assert len(opened.boxes) == 203
    few, its_edges = a_large_dag(3)
    assert len(DagPicture(few, its_edges).boxes) == 8
    assert len(DagPicture(few, its_edges, collapse=True).boxes) == 4


@pytest.mark.parametrize("shape", ["one of each type", "a chain"])
def test_a_picture_has_a_largest_number_of_boxes(shape: str) -> None:
    tasks = [
        node(number, type=f"type {number}" if shape == "one of each type" else "x") for number in range(5_000)
    ]
    pairs = edges(*((n, n + 1) for n in range(4_999))) if shape == "a chain" else []
    picture = DagPicture(tasks, pairs, collapse=False)
    assert len(picture.boxes) <= 2_000
    assert sum(len(box.members) if isinstance(box, Group) else 1 for box in picture.boxes) == 5_000
    parsed(picture.svg(title="x"))


def test_the_time_of_a_task_is_from_its_first_start_to_its_end() -> None:
    from lineshaft.pictures.nodes import _duration, _fraction  # noqa: PLC0415

    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert _duration(None, now) is None
    assert _duration(now - timedelta(minutes=1), now) == 60
    assert _duration(now + timedelta(seconds=1), now) == 0  # clocks differ
    found = [
        _fraction(p)
        for p in (0.25, 1, {"done": 1, "total": 4}, True, "half", 7, {"done": 5, "total": 4}, None)
    ]
    assert found == [0.25, 1, 0.25, None, None, None, None, None]
    assert _fraction({"done": 1, "total": 0}) is None
