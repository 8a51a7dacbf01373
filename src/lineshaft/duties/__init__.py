"""What runs in the background: one file a duty, all of one shape.

A duty has a name, an interval and `run_once()`, which does bounded batches until there is nothing left to do
and gives counts of what it did. `loop` calls it again and again. Every duty is safe on any number of nodes at
once; where one in the whole fleet is enough, it takes an advisory lock for the length of a transaction.
"""
