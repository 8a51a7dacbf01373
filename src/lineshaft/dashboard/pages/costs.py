"""Costs: what was spent, by day, type, model and agent."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
