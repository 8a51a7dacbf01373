"""Pictures of DAGs: SVG for pages and files, text for Mermaid. No database and no HTTP."""

from pathlib import Path

from lineshaft.pictures.dag import DagPicture, dag_svg
from lineshaft.pictures.mermaid import dag_mermaid
from lineshaft.pictures.nodes import DagNode, critical_path, edges_of, nodes_of, title_of_list

#: For pages that show pictures; a file of its own has it inside.
STYLE_SHEET = Path(__file__).parent / "dag.css"

__all__ = [
    "STYLE_SHEET",
    "DagNode",
    "DagPicture",
    "critical_path",
    "dag_mermaid",
    "dag_svg",
    "edges_of",
    "nodes_of",
    "title_of_list",
]
