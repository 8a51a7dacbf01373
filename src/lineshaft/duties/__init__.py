"""Background jobs, one file each, all with the same interface.

A duty has a name, an interval and `run_once()`, which works in bounded batches until nothing is left to do
and returns counts of what it did. `loop` calls it at its interval. Every duty can run on any number of nodes
at the same time; where one run in the whole fleet is enough, it takes a transaction-level advisory lock.
"""
