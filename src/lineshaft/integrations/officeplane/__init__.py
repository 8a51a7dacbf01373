"""OfficePlane's API (document 003): a guest of the server, over the same tasks as /v1.

`preset` is data that every process loads, so this package imports nothing by itself. The rest is above the
server's routes, and `server/app.py` mounts it.
"""
