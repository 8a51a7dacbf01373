"""The text for Mermaid."""

import re

from hypothesis import given
from hypothesis import strategies as st

from lineshaft.model.states import Status
from lineshaft.pictures import dag_mermaid
from tests.pictures.graphs import edges, hostile_texts, node, nodes, patient, structures

#: A label in quotes has words, harmless marks and characters as numbers.
_LABEL = r"(?:[\w ×.,…/-]|#\d+;)*"
_LINE = re.compile(
    rf'  (?:accTitle: {_LABEL}|n\d+\["{_LABEL}<br/>[A-Z_]+"\]:::[A-Z_]+|n\d+ (?:-->|==>) n\d+'
    r"|classDef [A-Z_]+ fill:#ffffff,color:#1f2328,stroke:#[0-9A-F]{6},stroke-width:2px)"
)


def test_a_flowchart_with_states_and_the_critical_path() -> None:
    tasks = [
        node(1, title='Test & "deploy"', status=Status.COMPLETED, duration_sec=5),
        node(2, title="Größe: 日本", status=Status.RUNNING),
        node(3, type="short", status=Status.COMPLETED, duration_sec=1),
    ]
    assert dag_mermaid(tasks, edges((1, 2), (3, 2)), title="Page") == (
        "flowchart LR\n"
        "  accTitle: Page\n"
        '  n0["Test #38; #34;deploy#34;<br/>COMPLETED"]:::COMPLETED\n'
        '  n1["Größe#58; 日本<br/>RUNNING"]:::RUNNING\n'
        '  n2["Title of 3<br/>COMPLETED"]:::COMPLETED\n'
        "  n0 ==> n1\n"
        "  n2 --> n1\n"
        "  classDef RUNNING fill:#ffffff,color:#1f2328,stroke:#190EE5,stroke-width:2px\n"
        "  classDef COMPLETED fill:#ffffff,color:#1f2328,stroke:#115545,stroke-width:2px\n"
    )


@patient(max_examples=40)
@given(st.data())
def test_hostile_text_stays_in_its_label(data: st.DataObject) -> None:
    boxes, pairs = data.draw(structures(5))
    text = dag_mermaid(data.draw(nodes(boxes)), edges(*pairs), title=data.draw(hostile_texts))
    head, *lines = text.removesuffix("\n").split("\n")
    assert head == "flowchart LR"
    for line in lines:
        assert _LINE.fullmatch(line), line
    assert sum(":::" in line for line in lines) == boxes
    assert sum("->" in line or "=>" in line for line in lines) == len(pairs)
