"""Tasks: the list with its filters, search, and bulk actions."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
