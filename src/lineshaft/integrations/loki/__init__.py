"""`.loki`: queue files that a swarm of agents shares (document 000). `docs/loki.md` describes it for users.

- `preset` is data that every process loads; it imports the model only.
- `records` and `attempts` are pure: records to tasks and back, and what a failed attempt makes of a record.
- `folder` and `locks` are the files: how they are locked, read and replaced. They know nothing about a queue.
- `claimer` is the swarm's own protocol on the files alone, for shell scripts.
- `importing` and `exporting` plan what moves between a folder and a queue.
- `mirror` keeps a folder and a queue alike. It sits above the engine, because it hands claims over from one
  agent to another within a transaction, which the client can't. Its parts: `shown` (tasks in their places, in
  a `view`), `files`, `intake` (what programs did, `changes`), `offers` and `holdings` (claims for programs),
  `signals` (what it writes besides queue files).

This package imports nothing by itself, so that the preset stays cheap.
"""
