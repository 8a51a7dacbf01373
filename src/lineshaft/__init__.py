"""Lineshaft: a durable task queue for fleets of AI agents, on PostgreSQL."""

__version__ = "0.1.0"

__all__ = ["__version__"]
