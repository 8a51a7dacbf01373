-- Which tasks refer to which artifacts. These statements also run in callers' own transactions.

-- name: refer
-- KEY SHARE keeps the artifacts until the transaction ends; the janitor skips them. Returns those that exist.
WITH held AS MATERIALIZED (
    SELECT id FROM lineshaft.artifact WHERE id = ANY (%(artifact_ids)s::text[]) ORDER BY id FOR KEY SHARE
),
added AS (
    INSERT INTO lineshaft.artifact_ref (task_id, artifact_id)
    SELECT wanted.task_id, wanted.artifact_id
    FROM unnest(%(task_ids)s::text[], %(artifact_ids)s::text[]) AS wanted (task_id, artifact_id)
    JOIN held ON held.id = wanted.artifact_id
    ON CONFLICT DO NOTHING
)
SELECT id FROM held

-- name: sizes
SELECT id, size FROM lineshaft.artifact WHERE id = ANY (%(ids)s::text[])
