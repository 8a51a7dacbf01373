-- name: list_event_sources
-- By source_of_events.
SELECT name, cursor, definition FROM lineshaft.source WHERE cursor IS NOT NULL ORDER BY name

-- name: lock_at
-- If several servers read the same events, one moves the cursor, and only that one fires. The others don't wait.
SELECT id, created_at, next_tick, paused, name, kind, definition, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.source WHERE name = %(name)s::text AND cursor = %(cursor)s::text
FOR NO KEY UPDATE SKIP LOCKED

-- name: created_lately
-- What a source has created within a minute, up to its limit: by firing_pkey, the newest first.
SELECT count(*) AS created
FROM (
    SELECT firing.at, firing.outcome
    FROM lineshaft.firing
    WHERE firing.source_id = (SELECT source.id FROM lineshaft.source WHERE source.name = %(name)s::text)
    ORDER BY firing.id DESC LIMIT %(most)s::integer
) AS recent
WHERE recent.outcome = 'created' AND recent.at > coalesce(%(now)s::timestamptz, now()) - interval '1 minute'

-- name: move
UPDATE lineshaft.source SET cursor = %(cursor)s::text WHERE id = %(id)s::bigint

-- name: depth
-- How many event sources led to this task or DAG.
SELECT coalesce(max(depth), 0)::integer AS depth FROM lineshaft.source_work
WHERE dag_id = coalesce(%(dag_id)s::text, (SELECT task.dag_id FROM lineshaft.task WHERE task.id = %(task_id)s::text))
