"""DAGs: the list, and one DAG with its picture."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
