-- These statements also run in callers' transactions.

-- name: take_keys
-- The first transaction to insert a key owns it. Sorted, so that two submissions with the same keys can't deadlock. An expired key is
-- taken over.
INSERT INTO lineshaft.task_key AS known (key, task_id, content_hash, ttl_sec)
SELECT key, task_id, content_hash, ttl_sec
FROM unnest(%(keys)s::text[], %(task_ids)s::text[], %(hashes)s::bytea[], %(ttls)s::double precision[])
    AS wanted (key, task_id, content_hash, ttl_sec)
ORDER BY key
ON CONFLICT (key) DO UPDATE
    SET task_id = excluded.task_id, content_hash = excluded.content_hash, expires_at = NULL, ttl_sec = excluded.ttl_sec
    WHERE
        -- include: key_is_free
RETURNING key

-- name: read_keys
-- Under a new snapshot, which sees the owners.
SELECT key, task_id, content_hash FROM lineshaft.task_key WHERE key = ANY (%(keys)s::text[])

-- name: count_duplicates
SELECT nextval('lineshaft.duplicate_no') FROM generate_series(1, %(n)s::integer)

-- name: lock_owners
-- Live tasks that a submission may replace or cancel, in the one order in which rows of tasks are locked.
SELECT
    live.id, live.status::text AS status, live.epoch, task.type, live.is_batch, task.parent_id, task.dag_id, live.dag_id AS live_dag_id,
    lineshaft.lock_keys_1(task.lock_key, task.admission) AS lock_keys, live.cost_usd, task.created_at, task.created_by_token
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = ANY (%(ids)s::text[])
ORDER BY live.id
FOR UPDATE OF live

-- name: read_relations
-- Follows lock_owners, under a newer snapshot: adding a dependent locks its upstream first.
SELECT owner.id,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = owner.id AND edge.kind = 'success') AS depends_on,
    EXISTS (
        SELECT FROM lineshaft.edge
        WHERE edge.depends_on = owner.id AND NOT edge.satisfied
          AND EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = edge.task_id)
    ) AS has_dependents,
    EXISTS (
        SELECT FROM lineshaft.task
        WHERE task.parent_id = owner.id AND EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = task.id)
    ) AS has_children
FROM unnest(%(ids)s::text[]) AS owner (id)

-- name: read_time
-- Later than any other transaction whose locks this one has waited for.
SELECT coalesce(%(now)s::timestamptz, clock_timestamp())

-- name: forget
-- What belongs to the work that tasks were to do before: steps and children's records, checkpoint, waits, signals (an approval isn't one of
-- the new work), and artifacts that they were to get.
WITH steps AS (DELETE FROM lineshaft.step WHERE task_id = ANY (%(ids)s::text[])),
checkpoints AS (DELETE FROM lineshaft.checkpoint WHERE task_id = ANY (%(ids)s::text[])),
waits AS (DELETE FROM lineshaft.wait WHERE task_id = ANY (%(ids)s::text[])),
signals AS (DELETE FROM lineshaft.signal WHERE task_id = ANY (%(ids)s::text[]))
DELETE FROM lineshaft.artifact_ref WHERE task_id = ANY (%(ids)s::text[])

-- name: replace_task
-- PENDING, READY or RETRYING → PENDING or READY, from the beginning: attempts start at 0; the epoch continues, so that no earlier claim
-- matches; cost adds up. Guarded by the row lock that lock_owners holds. Dependencies, DAG and parent stay. A task that was READY
-- keeps its age.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
    WHERE
        -- include: knows_types
),
before AS MATERIALIZED (SELECT to_jsonb(task) AS fields FROM lineshaft.task WHERE task.id = %(id)s::text),
stored AS (
    UPDATE lineshaft.task
    SET title = %(title)s::text, preset = %(preset)s::text, spec = %(spec)s::jsonb, inputs = %(inputs)s::jsonb,
        required_capabilities = %(required_capabilities)s::text[], model_preferences = %(model_preferences)s::text[],
        fallback_models = %(fallback_models)s::text[], max_cost_usd = %(max_cost_usd)s::numeric,
        max_total_cost_usd = %(max_total_cost_usd)s::numeric, lock_key = %(lock_key)s::text, admission = %(admission)s::jsonb,
        retry = %(retry)s::jsonb, output_type = %(output_type)s::text, gates = %(gates)s::jsonb, tags = %(tags)s::text[],
        created_by = %(created_by)s::text, surface = %(surface)s::jsonb, deadline = %(deadline)s::timestamptz,
        run_at = %(run_at)s::timestamptz, priority_boost_per_minute = %(priority_boost_per_minute)s::double precision,
        max_duration_sec = %(max_duration_sec)s::double precision,
        heartbeat_interval_sec = %(heartbeat_interval_sec)s::double precision, priority = %(priority)s::smallint,
        max_attempts = %(max_attempts)s::smallint, require_decision_report = %(require_decision_report)s::boolean,
        ignore_failure = %(ignore_failure)s::boolean, expire_at_deadline = %(expire_at_deadline)s::boolean,
        open_limits = %(open_limits)s::smallint, type_revision = %(type_revision)s::integer
    FROM clock
    WHERE task.id = %(id)s::text
    RETURNING to_jsonb(task) AS fields
),
known AS (
    UPDATE lineshaft.task_key SET content_hash = decode(%(hash)s::text, 'hex'), ttl_sec = %(ttl)s::double precision
    FROM clock
    WHERE task_key.key = %(key)s::text AND task_key.task_id = %(id)s::text
),
placed AS (
    UPDATE lineshaft.task_live AS live
    SET status = CASE WHEN start.waits THEN 'PENDING' ELSE 'READY' END::lineshaft.task_status,
        lane_id = %(lane_id)s::integer, priority = %(priority)s::smallint, deadline = %(deadline)s::timestamptz,
        rank = lineshaft.rank(
            %(priority)s::smallint, live.downstream, %(boost)s::double precision, coalesce(live.ready_at, start.now),
            %(deadline)s::timestamptz, start.now
        ),
        rekey_at = coalesce(lineshaft.rekey_at(%(deadline)s::timestamptz, start.now), %(deadline)s::timestamptz),
        ready_at = CASE WHEN NOT start.waits THEN coalesce(live.ready_at, start.now) END,
        due_at = CASE WHEN %(run_at)s::timestamptz > start.now THEN %(run_at)s::timestamptz END,
        generation = (SELECT last_value FROM lineshaft.generation_no WHERE pg_current_xact_id() IS NOT NULL),
        parked = CASE WHEN %(admission)s::jsonb ? 'fair' THEN 'fair' END, parked_key = NULL,
        lock_key = lineshaft.first_lock_1(%(lock_key)s::text, %(admission)s::jsonb),
        admission = %(admission)s::jsonb,
        heartbeat_sec = %(heartbeat_interval_sec)s::double precision, limit_sec = %(max_duration_sec)s::double precision,
        is_gated = %(gates)s::jsonb IS NOT NULL OR %(require_decision_report)s::boolean, expires = %(expire_at_deadline)s::boolean,
        max_cost_usd = %(max_cost_usd)s::numeric, max_total_cost_usd = %(max_total_cost_usd)s::numeric,
        attempts = 0, rate_limits = 0, revivals = live.revivals + CASE WHEN live.epoch > 0 THEN 1 ELSE 0 END,
        last_category = NULL, progress = NULL, budget_reported = false,
        -- A claim whose snapshot has the task as it was notices this (claims.sql).
        submission_no = nextval('lineshaft.submission_no')
    FROM (
        SELECT clock.now, before.blocked > 0 OR coalesce(%(run_at)s::timestamptz > clock.now, false) AS waits
        FROM clock CROSS JOIN lineshaft.task_live AS before
        WHERE before.id = %(id)s::text
    ) AS start
    WHERE live.id = %(id)s::text
    RETURNING live.id, live.dag_id, live.epoch, live.status, live.lane_id
),
-- Behind a task that waited for its turn comes the next of its key.
next_shown AS MATERIALIZED (
    SELECT lineshaft.show_next_1(ARRAY[before.admission ->> 'fair'], ARRAY[before.lane_id], ARRAY[before.id])
    FROM lineshaft.task_live AS before
    WHERE before.id = %(id)s::text AND before.status = 'READY' AND before.parked = 'fair' AND before.parked_key IS NULL
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, epoch, data)
    SELECT clock.now, CASE WHEN placed.status = 'READY' THEN '{task.replaced,task.ready}' ELSE '{task.replaced}' END::text[],
        placed.id, placed.dag_id, placed.epoch,
        jsonb_build_object('changed', coalesce(difference.names, '[]'))
            || CASE WHEN %(run_at)s::timestamptz > clock.now THEN jsonb_build_object('run_at', lineshaft.iso(%(run_at)s::timestamptz)) ELSE '{}' END
            || %(act)s::jsonb
    FROM placed
    CROSS JOIN clock
    CROSS JOIN (
        SELECT jsonb_agg(earlier.key ORDER BY earlier.key) AS names
        FROM before, stored, jsonb_each(before.fields) AS earlier
        JOIN LATERAL jsonb_each(stored.fields) AS later ON later.key = earlier.key
        WHERE later.value IS DISTINCT FROM earlier.value
    ) AS difference
    WHERE (SELECT count(*) FROM next_shown) >= 0
)
SELECT
    -- include: notify_lanes
FROM placed WHERE status = 'READY' HAVING count(*) > 0
