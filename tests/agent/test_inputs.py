"""Inputs: outputs of upstream tasks, in `ctx.inputs` and as arguments of handlers."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from lineshaft import Agent, ForEach, Lineshaft, NewTask, TaskContext
from lineshaft.engine.claim import claims
from lineshaft.errors import DependencyNotFoundError, InvalidInputError
from lineshaft.model.states import Status
from lineshaft.types import ForEachInfo, Resolution
from tests.agent.helpers import drain


@dataclass
class Notes:
    text: str


class Draft(pydantic.BaseModel):
    title: str
    words: int = 0


class Page(msgspec.Struct):
    path: str


agent = Agent("a", max_concurrent_tasks=5)
seen: dict[str, Any] = {}


@agent.task("research")
async def research(prompt: str) -> Notes:
    return Notes(prompt)


@agent.task("draft")
def draft(title: str) -> Draft:
    return Draft(title=title, words=2)


@agent.task("page")
async def page(path: str) -> Page:
    return Page(path)


@agent.task("implement")
async def implement(ctx: TaskContext, notes: Notes, *, depth: int = 1) -> str:
    seen["implement"] = (notes, depth, dict(ctx.inputs), ctx.spec)
    return notes.text.upper()


@agent.task("publish")
def publish(draft: Draft, pages: list[Page], notes: Notes | None = None) -> dict[str, Any]:
    seen["publish"] = (draft, pages, notes)
    return {"title": draft.title, "pages": len(pages)}


@agent.task("look")
async def look(ctx: TaskContext) -> dict[str, Any]:
    seen[ctx.id] = ctx
    return dict(ctx.inputs)


async def test_outputs_arrive_as_arguments_of_their_types(shaft: Lineshaft) -> None:
    """Dataclasses, pydantic models and msgspec structs; from tasks of the same DAG and from earlier ones."""
    first = await shaft.submit(page.new("a.html"))
    notes = research.new("gears").with_options(key="research")
    text = draft.new("Gears").with_options(key="draft")
    second = page.new("b.html").with_options(key="b")

    dag = await shaft.submit_dag(
        "Site",
        [
            notes,
            text,
            second,
            implement.new(notes.as_input(), depth=3).with_options(key="code"),
            publish.new(draft=text.as_input(), pages=[second.as_input(), first.as_input()]).with_options(
                key="publish"
            ),
        ],
    )
    await drain(shaft, agent)

    assert await dag["code"].result(60) == "GEARS"
    assert await dag["research"].result(60) == Notes("gears")
    assert await dag["draft"].result(60) == Draft(title="Gears", words=2)
    assert await first.result(60) == Page("a.html")
    assert seen["implement"] == (Notes("gears"), 3, {"notes": {"text": "gears"}}, {"depth": 3})
    assert seen["publish"] == (Draft(title="Gears", words=2), [Page("b.html"), Page("a.html")], None)
    task = await dag["publish"].task()
    assert task.inputs == {"draft": dag["draft"].id, "pages": [dag["b"].id, first.id]}
    assert sorted(task.depends_on) == sorted([dag["draft"].id, dag["b"].id, first.id])


async def test_inputs_by_name_and_what_depends_on_names(shaft: Lineshaft) -> None:
    """A handler that lives elsewhere is named by its type."""
    earlier = await shaft.submit(research.new("belts"))
    dag = await shaft.submit_dag(
        "By name",
        [
            NewTask("research", key="sections", spec={"prompt": "gears"}),
            NewTask("implement", key="by-input", inputs={"notes": "sections"}),
            NewTask(
                "look",
                key="look",
                depends_on=["sections", earlier.id],
                inputs={"both": ["sections", earlier.id]},
            ),
            NewTask("look", key="spec", spec={"context_refs": ["task:sections:output"]}),
        ],
    )
    await drain(shaft, agent)

    gears, belts = {"text": "gears"}, {"text": "belts"}
    assert await dag["by-input"].result(60) == "GEARS"
    assert await dag["look"].result(60) == {"sections": gears, earlier.id: belts, "both": [gears, belts]}
    assert await dag["spec"].result(60) == {"task:sections:output": gears}
    with pytest.raises(KeyError, match=r"has no input 'section', only 'task:sections:output'.*depends_on"):
        seen[dag["spec"].id].inputs["section"]


async def test_an_output_of_the_wrong_type_fails_once_with_all_names(shaft: Lineshaft) -> None:
    wrong = await shaft.submit(page.new("a.html"))
    for task_type, name in (("implement", "notes"), ("publish", "draft")):
        handle = await shaft.submit(
            NewTask(task_type, inputs={name: wrong.id}, spec={"pages": []} if name == "draft" else {})
        )
        await drain(shaft, agent)
        task = await handle.task()

        assert (task.status, task.failure_category, task.attempts) == (
            Status.DEAD_LETTERED,
            "invalid_input",
            1,
        )
        reason = str(task.failure_reason)
        assert f"Parameter {name!r} of {task_type}(" in reason
        assert f"expects {'Notes' if name == 'notes' else 'Draft'}" in reason.replace(
            "tests.agent.test_inputs.", ""
        )
        assert f"the output of task {wrong.id} doesn't fit" in reason

    missing = await shaft.submit(NewTask("implement", depends_on=[wrong.id]))
    await drain(shaft, agent)
    reason = str((await missing.task()).failure_reason)
    assert "missing required field `notes`" in reason
    assert f"Its inputs are: {wrong.id}" in reason


async def test_a_person_replaces_an_input_that_does_not_fit(shaft: Lineshaft) -> None:
    """The spec takes precedence; references by key stay valid."""
    dag = await shaft.submit_dag(
        "Wrong",
        [
            page.new("a.html").with_options(key="page"),
            NewTask(
                "implement", key="code", inputs={"notes": "page"}, spec={"context_refs": ["task:page:output"]}
            ),
        ],
    )
    await drain(shaft, agent)
    spec = {"notes": {"text": "by hand"}, "context_refs": ["task:page:output"]}
    await shaft.resolve(dag["code"], Resolution.MODIFY_AND_RETRY, reviewer="human:ann", spec=spec)
    await drain(shaft, agent)

    assert await dag["code"].result(60) == "BY HAND"
    assert seen["implement"][2]["task:page:output"] == {"path": "a.html"}


async def test_inputs_too_large_together_are_left_out(
    shaft: Lineshaft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_INPUT_BYTES", 1_000)
    small = await shaft.submit(research.new("gears"))
    large = await shaft.submit(research.new("".join(map(chr, range(0x4E00, 0x4E00 + 1_000)))))
    handle = await shaft.submit(NewTask("look", inputs={"a": small.id, "large": large.id}))
    await drain(shaft, agent)

    assert await handle.result(60) == {"a": {"text": "gears"}}
    with pytest.raises(KeyError, match=f"'large'.*did not come along.*Lineshaft.get.'{large.id}'"):
        seen[handle.id].inputs["large"]
    failed = await shaft.submit(NewTask("implement", inputs={"notes": large.id}))
    await drain(shaft, agent)
    assert "Of its inputs, notes did not come along" in str((await failed.task()).failure_reason)


async def test_mistakes_are_found_at_submission(shaft: Lineshaft) -> None:
    with pytest.raises(
        TypeError, match=r"'research' can't be an argument: the task has no key.*with_options"
    ):
        implement.new(research.new("x").as_input())
    with pytest.raises(TypeError, match="together with values"):
        publish.new(Draft(title="x"), [research.new("x").with_options(key="r").as_input(), Page("a")])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="inputs: 'notes' is in the spec too"):
        await shaft.submit(NewTask("implement", spec={"notes": {}}, inputs={"notes": "x"}))
    with pytest.raises(InvalidInputError, match="inputs: must be an object"):
        await shaft.submit(NewTask("implement", inputs=["x"]))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="inputs: 'notes' must be"):
        await shaft.submit(NewTask("implement", inputs={"notes": ""}))
    with pytest.raises(DependencyNotFoundError, match="'nowhere' is neither a key of this call nor"):
        await shaft.submit(NewTask("implement", inputs={"notes": "nowhere"}))


@agent.task("scan")
async def scan(files: list[Any]) -> dict[str, Any]:
    return {"files": files}


@agent.task("review")
async def review(item: Page, index: int, *, strict: bool = False) -> str:
    return f"{index}: {item.path}{' strictly' if strict else ''}"


def two_pages(**fields: Any) -> list[NewTask]:
    return [
        NewTask("scan", key="scan", spec={"files": [{"path": "a"}, {"path": "b"}]}),
        NewTask("review", key="review", **({"for_each": ForEach("scan.files")} | fields)),
    ]


async def test_each_item_of_a_list_arrives_as_an_argument(shaft: Lineshaft) -> None:
    """As the parameter's type; a typed task may have the list too, and others take parts of outputs."""
    dag = await shaft.submit_dag(
        "Reviews",
        [
            *two_pages(spec={"strict": True}),
            NewTask("look", key="look", inputs={"second": "review.1", "path": "scan.files.0.path"}),
        ],
    )
    await drain(shaft, agent)

    assert await dag["review"].result(60) == ["0: a strictly", "1: b strictly"]
    assert await dag["look"].result(60) == {"second": "1: b strictly", "path": "a"}
    task = await dag["review"].task()
    assert task.for_each == ForEachInfo("scan.files")
    children = (await shaft.list(parent_id=task.id)).items
    assert sorted((child.index, child.item, child.title) for child in children) == [
        (0, {"path": "a"}, "review [0]"),
        (1, {"path": "b"}, "review [1]"),
    ]


async def test_an_item_of_the_wrong_type_fails_with_its_reason(shaft: Lineshaft) -> None:
    dag = await shaft.submit_dag(
        "Reviews",
        [
            NewTask("scan", key="scan", spec={"files": [{"name": "a"}]}),
            NewTask("review", key="review", for_each=ForEach("scan.files")),
        ],
    )
    await drain(shaft, agent)

    (child,) = (await shaft.list(parent_id=dag["review"].id)).items
    assert child.failure_category == "invalid_input"
    assert child.failure_reason is not None
    assert (
        "index: int, strict: bool = False) expects tests.agent.test_inputs.Page, but the item of the list "
        "doesn't fit: Object missing required field"
    ) in child.failure_reason
    assert (await shaft.get(dag["review"])).failure_reason == f"child {child.id} failed"


async def test_a_part_that_is_not_there_is_named(shaft: Lineshaft) -> None:
    dag = await shaft.submit_dag(
        "A page",
        [
            NewTask("scan", key="scan", spec={"files": []}),
            NewTask("implement", key="implement", inputs={"notes": "scan.files.0"}),
        ],
    )
    await drain(shaft, agent)

    reason = (await shaft.get(dag["implement"])).failure_reason
    assert reason is not None
    assert f"notes ({dag['scan'].id}.files.0) did not come along: the output has no such part" in reason


async def test_a_part_of_a_large_output(shaft: Lineshaft) -> None:
    """The output is in the artifact store; the agent takes the part."""
    large = ["x" * (2 << 20), "small"]
    dag = await shaft.submit_dag(
        "Large",
        [
            NewTask("scan", key="scan", spec={"files": large}),
            NewTask("look", key="look", inputs={"small": "scan.files.1", "none": "scan.files.2"}),
        ],
    )
    await drain(shaft, agent)

    assert await dag["look"].result(60) == {"small": "small"}
