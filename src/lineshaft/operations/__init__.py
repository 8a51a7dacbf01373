"""The table of operations: what each call of the queue is, said once, one file per resource.

An operation is a typed function `(engine, request) -> response` with its description: method, path, scope,
error codes, whether it may be repeated, whether it is an act by hand, an example. From it come the route of a
server and its part of the OpenAPI document, the call of a client over HTTP, the call on a database and tests.
`operation.py` has the description, `wire.py` how a request travels over HTTP.

A module here may import `types` and `model`, and of the engine only what doesn't import the database driver,
because clients over HTTP import these modules too; a handler imports the rest when it is called. Connections,
tokens and the format of errors are not its business. What needs the connection itself (long polls, streams,
bytes of artifacts) is described in the same way in `server/routes/`.
"""
