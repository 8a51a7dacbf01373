"""Sources: what fires next, and whether the last firing worked."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
