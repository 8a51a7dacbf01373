"""New: submit a task, a DAG or a goal."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
