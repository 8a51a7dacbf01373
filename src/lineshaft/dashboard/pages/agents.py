"""Agents: capacity, instances, budgets."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
