"""`.loki`: queue files that a swarm of agents shares (document 000).

`preset` is data that every process loads, so this package imports nothing by itself. What reads and writes
such a folder belongs here too, above the client.
"""
