"""Pictures of DAGs: SVG for pages and files, text for Mermaid. No database and no HTTP."""

from lineshaft.pictures.dag import DagPicture, dag_svg
from lineshaft.pictures.mermaid import dag_mermaid
from lineshaft.pictures.nodes import DagNode, edges_of, nodes_of

__all__ = ["DagNode", "DagPicture", "dag_mermaid", "dag_svg", "edges_of", "nodes_of"]
