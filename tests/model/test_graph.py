"""Cycles, roots, leaves, the critical path."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import CycleError
from lineshaft.model import graph as g

#: The DAG of a landing page.
LANDING_PAGE = {
    "research": [],
    "design": [],
    "synthesize": ["research", "design"],
    "implement": ["synthesize"],
    "deploy": ["implement"],
}


@st.composite
def dags(draw: st.DrawFn) -> dict[str, list[str]]:
    """Any graph without a cycle: each task depends only on earlier ones, listed in any order."""
    size = draw(st.integers(1, 12))
    names = draw(st.permutations([f"t{i}" for i in range(size)]))
    built = {
        f"t{i}": draw(st.lists(st.sampled_from([f"t{j}" for j in range(i)]), unique=True)) if i else []
        for i in range(size)
    }
    return {name: built[name] for name in names}


def longest_below(graph: dict[str, list[str]], task: str, finished: set[str]) -> int:
    """The definition of R-163, by plain recursion."""
    dependents = [other for other, upstream in graph.items() if task in upstream]
    return max((longest_below(graph, d, finished) + (d not in finished) for d in dependents), default=0)


def assert_is_cycle(graph: dict[str, list[str]], cycle: tuple[str, ...]) -> None:
    assert cycle[0] == cycle[-1]
    assert len(cycle) > 1
    assert all(after in graph[before] for before, after in pairwise(cycle))


@given(dags())
def test_order_puts_each_task_after_its_dependencies(graph: dict[str, list[str]]) -> None:
    place = {task: i for i, task in enumerate(g.order(graph))}

    assert all(place[upstream] < place[task] for task, ups in graph.items() for upstream in ups)


@given(dags(), st.data())
def test_a_cycle_is_found_and_named_by_a_path_that_exists(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    """R-143."""
    ordered = g.order(graph)
    upstream = data.draw(st.sampled_from(ordered))
    reachable = {upstream}
    for task in reversed(ordered):
        if task in reachable:
            reachable |= set(graph[task])
    closing = data.draw(st.sampled_from(sorted(reachable)))
    cyclic = {task: [*ups, upstream] if task == closing else ups for task, ups in graph.items()}

    with pytest.raises(CycleError) as caught:
        g.order(cyclic)
    assert_is_cycle(cyclic, caught.value.cycle)
    late = g.closes_cycle(graph, closing, [upstream])
    assert late is not None
    assert late[0] == late[-1] == closing
    assert_is_cycle(cyclic, tuple(late))


@given(dags(), st.data())
def test_a_new_dependency_closes_a_cycle_only_if_the_whole_graph_has_one(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    """R-143, F-40: the check of one edge agrees with a check of everything."""
    task, upstream = data.draw(st.tuples(st.sampled_from(sorted(graph)), st.sampled_from(sorted(graph))))
    changed = {**graph, task: [*graph[task], upstream]}

    try:
        g.order(changed)
    except CycleError:
        assert g.closes_cycle(graph, task, [upstream]) is not None
    else:
        assert g.closes_cycle(graph, task, [upstream]) is None


def test_a_task_that_depends_on_itself_is_a_cycle() -> None:
    """R-010."""
    with pytest.raises(CycleError, match="a → a"):
        g.order({"a": ["a"]})
    assert g.closes_cycle({}, "a", ["a"]) == ["a", "a"]


def test_the_message_reads_as_depends_on() -> None:
    with pytest.raises(CycleError) as caught:
        g.order({"a": ["b"], "b": ["c"], "c": ["a"]})

    rotated = "a → b → c → a → b → c"
    assert " → ".join(caught.value.cycle) in rotated
    assert "depends on the next" in str(caught.value)


@pytest.mark.slow("a hundred thousand edges")
def test_a_long_chain_and_a_hundred_thousand_edges_need_no_recursion() -> None:
    """R-146: also where the cycle is 100,000 tasks long."""
    n = 100_000
    chain = {str(i): [str(i - 1)] if i else [] for i in range(n)}
    assert g.order(chain)[-1] == str(n - 1)
    assert g.downstream_lengths(chain)["0"] == n - 1
    assert g.closes_cycle(chain, "0", [str(n - 1)]) is not None

    chain["0"] = [str(n - 1)]
    with pytest.raises(CycleError) as caught:
        g.order(chain)
    assert len(caught.value.cycle) == n + 1


def test_roots_and_leaves_of_the_landing_page() -> None:
    """R-140."""
    assert g.roots(LANDING_PAGE) == ["research", "design"]
    assert g.leaves(LANDING_PAGE) == ["deploy"]


def test_a_dependency_outside_the_graph_is_not_a_member() -> None:
    """F-39: a task of another DAG."""
    graph = {"a": ["elsewhere"], "b": ["a"]}

    assert g.roots(graph) == ["a"]
    assert g.leaves(graph) == ["b"]
    assert g.downstream_lengths(graph) == {"a": 1, "b": 0}


@given(dags(), st.data())
def test_downstream_lengths_count_unfinished_tasks_below(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    """R-163, with a realistic set of finished tasks: their dependencies are finished too."""
    ordered = g.order(graph)
    finished = set(ordered[: data.draw(st.integers(0, len(ordered)))])

    found = g.downstream_lengths(graph, finished=finished)

    assert found == {task: longest_below(graph, task, finished) for task in graph}


@given(dags())
def test_the_critical_path_is_an_existing_chain_of_maximal_length(graph: dict[str, list[str]]) -> None:
    path = g.critical_path(graph)

    assert all(before in graph[after] for before, after in pairwise(path))
    assert len(path) == 1 + max(g.downstream_lengths(graph).values())


def test_the_critical_path_shrinks_as_tasks_finish() -> None:
    """R-148."""
    assert g.critical_path(LANDING_PAGE) == ["research", "synthesize", "implement", "deploy"]
    assert g.critical_path(LANDING_PAGE, finished=["research", "design", "synthesize"]) == [
        "implement",
        "deploy",
    ]
    assert g.critical_path(LANDING_PAGE, finished=LANDING_PAGE) == []
    assert g.critical_path({}) == []


def weight_above(graph: dict[str, list[str]], lengths: dict[str, int], task: str) -> int:
    return lengths[task] + max((weight_above(graph, lengths, up) for up in graph[task]), default=0)


@given(dags(), st.data())
def test_the_longest_path_has_the_greatest_sum_of_all_chains(
    graph: dict[str, list[str]], data: st.DataObject
) -> None:
    lengths = {task: data.draw(st.integers(0, 9)) for task in graph}
    path = g.longest_path(graph, lengths)

    assert not graph[path[0]]
    assert all(before in graph[after] for before, after in pairwise(path))
    assert sum(lengths[task] for task in path) == max(weight_above(graph, lengths, task) for task in graph)


@given(dags())
def test_a_depth_is_the_length_of_the_longest_chain_above(graph: dict[str, list[str]]) -> None:
    ones = dict.fromkeys(graph, 1)

    assert g.depths(graph) == {task: weight_above(graph, ones, task) - 1 for task in graph}


def test_names_outside_of_the_graph_have_no_depth_and_no_place_in_a_path() -> None:
    assert g.depths({"a": ["outside"], "b": ["a"]}) == {"a": 0, "b": 1}
    assert g.longest_path({"a": ["outside"], "b": ["a"]}, {"a": 1, "b": 1}) == ["a", "b"]
    assert g.longest_path({}, {}) == []
