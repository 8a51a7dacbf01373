"""Approvals: what waits for a person."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
