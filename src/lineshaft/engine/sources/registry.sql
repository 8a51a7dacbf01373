-- fragment: source_columns
    source.id, source.version, source.created_at, source.updated_at, source.updated_by, source.next_at, source.next_tick, source.paused, source.name, source.kind, source.origin,
    source.definition, source.applied, last.outcome AS last_outcome, last.last_at AS last_fired_at, opened.tasks AS open_tasks,
    EXISTS (SELECT FROM lineshaft.token WHERE token.id = source.token_id AND token.revoked_at IS NOT NULL) AS token_revoked,
    clock.now,
    CASE WHEN source.kind = 'files' THEN (
        SELECT jsonb_agg(jsonb_build_object(
            'name', watcher.name, 'folders', watcher.folders, 'fault', watcher.faults ->> source.name, 'looked_at', watcher.looked_at
        ))
        FROM lineshaft.file_watcher AS watcher
    ) END AS watchers,
    CASE WHEN source.kind = 'event' THEN (
        SELECT count(*) FROM (
            SELECT firing.at, firing.outcome FROM lineshaft.firing WHERE firing.source_id = source.id
            ORDER BY firing.id DESC LIMIT coalesce((source.definition ->> 'max_per_minute')::integer, 1000)
        ) AS recent
        WHERE recent.outcome = 'created' AND recent.at > clock.now - interval '1 minute'
    ) ELSE 0 END AS created_lately

-- fragment: source_details
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
LEFT JOIN LATERAL (
    SELECT tally.outcome, tally.last_at FROM lineshaft.source_tally AS tally WHERE tally.source_id = source.id
    ORDER BY tally.last_at DESC LIMIT 1
) AS last ON true
CROSS JOIN LATERAL (
    SELECT coalesce(sum(live.tasks), 0)::integer AS tasks
    FROM (
        SELECT work.id, work.is_task FROM lineshaft.source_work AS work WHERE work.source_id = source.id AND work.is_open
        ORDER BY work.created_at DESC LIMIT 1000
    ) AS unit
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN unit.is_task THEN (SELECT count(*) FROM lineshaft.task_live WHERE task_live.id = unit.id)
            ELSE (
                SELECT count(*) FROM lineshaft.task JOIN lineshaft.task_live ON task_live.id = task.id WHERE task.dag_id = unit.id
            )
        END AS tasks
    ) AS live
) AS opened

-- name: read_source
SELECT
-- include: source_columns
FROM lineshaft.source
-- include: source_details
WHERE source.name = %(name)s::text

-- name: list_sources
-- By source_name.
SELECT
-- include: source_columns
FROM lineshaft.source
-- include: source_details
WHERE source.name > %(after)s::text AND (%(kind)s::text IS NULL OR source.kind = %(kind)s::text)
ORDER BY source.name
LIMIT %(limit)s::integer

-- name: one_at_a_time
-- Two servers that start apply the same file.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.sources', 0))

-- name: lock_source
SELECT id, version, created_at, updated_at, updated_by, next_at, next_tick, cursor, paused, name, origin, definition, applied, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.source WHERE name = %(name)s::text FOR UPDATE

-- name: lock_of_origin
SELECT id, version, created_at, updated_at, updated_by, next_at, next_tick, cursor, paused, name, origin, definition, applied, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.source WHERE origin = %(origin)s::text ORDER BY name FOR UPDATE

-- name: read_now
SELECT coalesce(%(now)s::timestamptz, now()) AS now

-- name: insert_source
-- Nothing if another transaction has just created it.
INSERT INTO lineshaft.source (created_at, updated_at, updated_by, next_tick, next_at, cursor, name, kind, origin, definition, applied, token_id)
VALUES (
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()), %(actor)s::text, %(next_tick)s::timestamptz,
    %(next_at)s::timestamptz, %(cursor)s::text, %(name)s::text, %(kind)s::text, %(origin)s::text, %(definition)s::jsonb, %(applied)s::jsonb, %(token_id)s::text
)
ON CONFLICT (name) DO NOTHING
RETURNING id

-- name: update_source
UPDATE lineshaft.source
SET version = nextval('lineshaft.source_version'), updated_at = coalesce(%(now)s::timestamptz, now()), updated_by = %(actor)s::text,
    next_tick = %(next_tick)s::timestamptz, next_at = %(next_at)s::timestamptz,
    kind = %(kind)s::text, origin = %(origin)s::text, definition = %(definition)s::jsonb, applied = %(applied)s::jsonb,
    paused = %(paused)s::boolean, cursor = %(cursor)s::text, token_id = %(token_id)s::text
WHERE id = %(id)s::bigint

-- name: set_token
-- The same definition again, with another token.
UPDATE lineshaft.source SET token_id = %(token_id)s::text
WHERE id = %(id)s::bigint AND token_id IS DISTINCT FROM %(token_id)s::text

-- name: delete_source
-- The janitor deletes its history.
WITH gone AS (DELETE FROM lineshaft.source WHERE id = %(id)s::bigint RETURNING id),
seen AS (DELETE FROM lineshaft.file_seen USING gone WHERE file_seen.source_id = gone.id)
DELETE FROM lineshaft.source_tally USING gone WHERE source_tally.source_id = gone.id

-- name: log_change
INSERT INTO lineshaft.event (at, kinds, data)
SELECT coalesce(%(now)s::timestamptz, now()),
    CASE %(change)s::text
        WHEN 'create' THEN '{source.created}' WHEN 'remove' THEN '{source.deleted}' ELSE '{source.changed}'
    END::text[],
    %(data)s::jsonb

-- name: list_firings
-- By firing_pkey, the newest first.
SELECT id, at, outcome, task_ids, dag_id, error
FROM lineshaft.firing
WHERE source_id = %(source_id)s::bigint AND id < %(before)s::bigint
ORDER BY id DESC
LIMIT %(limit)s::integer

-- name: find_source_id
SELECT id FROM lineshaft.source WHERE name = %(name)s::text

-- name: totals
SELECT source.name, tally.outcome, tally.firings
FROM lineshaft.source_tally AS tally JOIN lineshaft.source ON source.id = tally.source_id
ORDER BY source.name, tally.outcome

-- name: lag
-- How late the oldest due tick is, by source_due.
SELECT greatest(extract(epoch FROM coalesce(%(now)s::timestamptz, now()) - min(next_at)), 0)::double precision AS lag
FROM lineshaft.source WHERE next_at IS NOT NULL

-- name: forget_firings
-- By firing_by_age.
DELETE FROM lineshaft.firing AS gone
USING (
    SELECT source_id, id FROM lineshaft.firing
    WHERE at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
    ORDER BY at LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
) AS old
WHERE gone.source_id = old.source_id AND gone.id = old.id

-- name: forget_keys
-- By source_key_expiry. Keys without an end stay.
DELETE FROM lineshaft.source_key AS known
USING (
    SELECT source_id, key FROM lineshaft.source_key
    WHERE expires_at IS NOT NULL AND expires_at <= coalesce(%(now)s::timestamptz, now())
    ORDER BY expires_at LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
) AS old
WHERE known.source_id = old.source_id AND known.key = old.key

-- name: forget_work
-- By source_work_by_age: what has ended, and is as old as firings that aren't kept.
WITH old AS MATERIALIZED (
    SELECT work.id, work.created_at,
        CASE
            WHEN work.is_task THEN EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = work.id)
            ELSE EXISTS (SELECT FROM lineshaft.dag WHERE dag.id = work.id AND dag.status IN ('pending', 'running'))
        END AS is_open
    FROM lineshaft.source_work AS work
    WHERE (work.created_at, work.id) > (%(after)s::timestamptz, %(after_id)s::text)
    ORDER BY work.created_at, work.id LIMIT %(limit)s::integer
),
gone AS (
    DELETE FROM lineshaft.source_work AS work USING old
    WHERE work.id = old.id AND NOT old.is_open
      AND old.created_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
    RETURNING work.id
),
closed AS (
    UPDATE lineshaft.source_work AS work SET is_open = false FROM old
    WHERE work.id = old.id AND work.is_open AND NOT old.is_open
      AND old.created_at >= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
)
SELECT old.created_at, old.id, gone.id IS NOT NULL AS deleted FROM old LEFT JOIN gone ON gone.id = old.id ORDER BY old.created_at, old.id

-- name: forget_orphans
-- What is left of sources that were deleted: one look-up for each source that has any.
WITH RECURSIVE known (source_id) AS (
    (SELECT source_id FROM lineshaft.firing ORDER BY source_id LIMIT 1)
    UNION ALL
    SELECT (
        SELECT firing.source_id FROM lineshaft.firing WHERE firing.source_id > known.source_id ORDER BY firing.source_id LIMIT 1
    )
    FROM known WHERE known.source_id IS NOT NULL
)
DELETE FROM lineshaft.firing AS gone
USING (
    SELECT firing.source_id, firing.id
    FROM known JOIN lineshaft.firing ON firing.source_id = known.source_id
    WHERE known.source_id IS NOT NULL AND NOT EXISTS (SELECT FROM lineshaft.source WHERE source.id = known.source_id)
    LIMIT %(limit)s::integer
    FOR UPDATE OF firing SKIP LOCKED
) AS old
WHERE gone.source_id = old.source_id AND gone.id = old.id

-- name: forget_orphaned_keys
WITH RECURSIVE known (source_id) AS (
    (SELECT source_id FROM lineshaft.source_key ORDER BY source_id LIMIT 1)
    UNION ALL
    SELECT (
        SELECT next.source_id FROM lineshaft.source_key AS next WHERE next.source_id > known.source_id ORDER BY next.source_id LIMIT 1
    )
    FROM known WHERE known.source_id IS NOT NULL
)
DELETE FROM lineshaft.source_key AS gone
USING (
    SELECT old.source_id, old.key
    FROM known JOIN lineshaft.source_key AS old ON old.source_id = known.source_id
    WHERE known.source_id IS NOT NULL AND NOT EXISTS (SELECT FROM lineshaft.source WHERE source.id = known.source_id)
    LIMIT %(limit)s::integer
    FOR UPDATE OF old SKIP LOCKED
) AS old
WHERE gone.source_id = old.source_id AND gone.key = old.key
