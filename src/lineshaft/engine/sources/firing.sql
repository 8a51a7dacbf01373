-- name: share_source
-- A source that fires can't be deleted in the meantime; other firings go on.
SELECT id, created_at, next_tick, paused, name, kind, definition, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.source WHERE name = %(name)s::text FOR KEY SHARE

-- name: lock_source
-- One firing at a time, where open work is limited.
SELECT id FROM lineshaft.source WHERE id = %(source_id)s::bigint FOR NO KEY UPDATE

-- name: take_keys
-- Sorted, so that two deliveries with the same keys can't deadlock. An expired key is taken over.
INSERT INTO lineshaft.source_key AS known (source_id, key, expires_at)
SELECT %(source_id)s::bigint, wanted.key, clock.now + make_interval(secs => wanted.ttl_sec)
FROM unnest(%(keys)s::text[], %(ttls)s::double precision[]) AS wanted (key, ttl_sec)
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ORDER BY wanted.key
ON CONFLICT (source_id, key) DO UPDATE SET expires_at = excluded.expires_at
    WHERE known.expires_at <= coalesce(%(now)s::timestamptz, now())
RETURNING key

-- name: is_known_key
SELECT true FROM lineshaft.source_key
WHERE source_id = %(source_id)s::bigint AND key = %(key)s::text
  AND (expires_at IS NULL OR expires_at > coalesce(%(now)s::timestamptz, now()))

-- name: close_ended
UPDATE lineshaft.source_work AS work SET is_open = false
WHERE work.source_id = %(source_id)s::bigint AND work.is_open
  AND CASE
      WHEN work.is_task THEN NOT EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = work.id)
      ELSE NOT EXISTS (SELECT FROM lineshaft.dag WHERE dag.id = work.id AND dag.status IN ('pending', 'running'))
  END

-- name: open_work
-- By source_work_open, the oldest first.
SELECT id, is_task FROM lineshaft.source_work WHERE source_id = %(source_id)s::bigint AND is_open ORDER BY created_at, id

-- name: add_task
INSERT INTO lineshaft.source_work (source_id, created_at, depth, is_task, id, dag_id)
SELECT %(source_id)s::bigint, coalesce(%(now)s::timestamptz, now()), %(depth)s::smallint, true, task.id, task.dag_id
FROM lineshaft.task WHERE task.id = %(id)s::text
ON CONFLICT (id) DO NOTHING

-- name: add_dag
INSERT INTO lineshaft.source_work (source_id, created_at, depth, is_task, id, dag_id)
VALUES (%(source_id)s::bigint, coalesce(%(now)s::timestamptz, now()), %(depth)s::smallint, false, %(id)s::text, %(id)s::text)
ON CONFLICT (id) DO NOTHING

-- name: record
-- The tally last: concurrent firings of a source wait for each other here, until one commits.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
recorded AS (
    INSERT INTO lineshaft.firing (source_id, at, outcome, task_ids, dag_id, error)
    SELECT %(source_id)s::bigint, clock.now, %(outcome)s::text, %(task_ids)s::text[], %(dag_id)s::text, %(error)s::text FROM clock
),
alerted AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT clock.now, '{alert}', jsonb_build_object('key', 'source:' || %(name)s::text, 'message', %(alert)s::text)
    FROM clock WHERE %(alert)s::text IS NOT NULL
)
INSERT INTO lineshaft.source_tally AS known (source_id, outcome, firings, last_at)
SELECT %(source_id)s::bigint, %(outcome)s::text, 1, clock.now FROM clock
ON CONFLICT (source_id, outcome) DO UPDATE SET firings = known.firings + 1, last_at = greatest(known.last_at, excluded.last_at)

-- name: log_fired
INSERT INTO lineshaft.event (at, kinds, data) VALUES (coalesce(%(now)s::timestamptz, now()), '{source.fired}', %(data)s::jsonb)
