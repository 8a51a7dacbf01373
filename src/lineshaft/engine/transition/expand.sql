-- name: lists
-- Tasks with a list and the number of its items; NULL: there is no list, and the output says what there is instead. Outputs stay in the
-- database: numbers in them are exact.
SELECT task.id, task.for_each, octet_length(task.spec::text) AS spec_bytes, source.id IS NULL AS deleted, list.n,
    CASE WHEN list.n IS NULL THEN source.output END AS output
FROM lineshaft.task
LEFT JOIN lineshaft.task_end AS source ON source.id = task.for_each->'source'->>'task'
CROSS JOIN LATERAL (
    SELECT source.output #> coalesce(string_to_array(task.for_each->'source'->>'path', '.'), '{}') AS items
) AS part
CROSS JOIN LATERAL (
    SELECT CASE WHEN jsonb_typeof(part.items) = 'array' THEN jsonb_array_length(part.items) END AS n
) AS list
WHERE task.id = ANY (%(ids)s::text[]) AND task.for_each IS NOT NULL
ORDER BY task.id

-- name: count_spawned
-- The DAG's row is locked from here on: of two expansions the second sees what the first has created.
UPDATE lineshaft.dag SET spawned = spawned + %(n)s::integer
WHERE id = %(dag_id)s::text AND spawned + %(n)s::integer <= %(most)s::integer
RETURNING spawned

-- name: expand
-- The children of a list, copied from the rows of their task, which this transaction has locked and which waits for nothing else. Each has its
-- item and its position as inputs, waits for the one `concurrency` positions before it, and has a lock of its own if the task has one.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
child AS MATERIALIZED (
    SELECT child.id, child.item, child.n, count(*) OVER () AS total,
        lag(child.id, least(%(concurrency)s::bigint, 1000000)::integer) OVER (ORDER BY child.n) AS turn_after
    FROM unnest(%(ids)s::text[], ARRAY(
        SELECT jsonb_array_elements(ended.output #> %(path)s::text[]) FROM lineshaft.task_end AS ended WHERE ended.id = %(source)s::text
    )) WITH ORDINALITY AS child (id, item, n)
),
stored AS (
    INSERT INTO lineshaft.task (
        id, dag_id, parent_id, type, title, preset, spec, inputs, required_capabilities, model_preferences, fallback_models, max_cost_usd,
        max_total_cost_usd, lock_key, admission, retry, output_type, gates, tags, created_by, created_by_token, deadline,
        priority_boost_per_minute, max_duration_sec, heartbeat_interval_sec, priority, max_attempts, require_decision_report,
        expire_at_deadline, open_limits, type_revision, created_at
    )
    SELECT
        child.id, task.dag_id, task.id, task.type, left(task.title, 980) || ' [' || (child.n - 1) || ']', task.preset, task.spec,
        coalesce(task.inputs, '{}') || jsonb_build_object(
            'item', jsonb_build_object('value', child.item), 'index', jsonb_build_object('value', child.n - 1)
        ),
        task.required_capabilities, task.model_preferences, task.fallback_models, task.max_cost_usd, task.max_total_cost_usd, task.lock_key,
        task.admission, task.retry, task.output_type, task.gates, task.tags, task.created_by, task.created_by_token, task.deadline,
        task.priority_boost_per_minute, task.max_duration_sec, task.heartbeat_interval_sec, task.priority, task.max_attempts,
        task.require_decision_report, task.expire_at_deadline, task.open_limits, task.type_revision, clock.now
    FROM child CROSS JOIN lineshaft.task CROSS JOIN clock
    WHERE task.id = %(id)s::text
    ORDER BY child.n
),
referred AS (
    INSERT INTO lineshaft.artifact_ref (task_id, artifact_id)
    SELECT child.id, ref.artifact_id FROM child JOIN lineshaft.artifact_ref AS ref ON ref.task_id = %(id)s::text
),
placed AS (
    INSERT INTO lineshaft.task_live (
        id, dag_id, status, lane_id, priority, downstream, blocked, deadline, rank, rekey_at, ready_at, generation, lock_key, admission,
        heartbeat_sec, limit_sec, is_gated, expires, max_cost_usd, max_total_cost_usd, parked
    )
    SELECT
        child.id, live.dag_id, CASE WHEN child.turn_after IS NULL THEN 'READY' ELSE 'PENDING' END::lineshaft.task_status, live.lane_id,
        live.priority, length.n, (child.turn_after IS NOT NULL)::integer, live.deadline,
        lineshaft.rank(live.priority, length.n, lane.boost_per_minute, clock.now, live.deadline, clock.now),
        coalesce(lineshaft.rekey_at(live.deadline, clock.now), live.deadline),
        CASE WHEN child.turn_after IS NULL THEN clock.now END,
        (SELECT last_value FROM lineshaft.generation_no WHERE pg_current_xact_id() IS NOT NULL),
        live.lock_key, live.admission, live.heartbeat_sec, live.limit_sec, live.is_gated, live.expires, live.max_cost_usd, live.max_total_cost_usd,
        -- Claims know of fair shares already: its task has the same key.
        CASE WHEN live.admission ? 'fair' THEN 'fair' END
    FROM child
    CROSS JOIN lineshaft.task_live AS live
    JOIN lineshaft.lane ON lane.id = live.lane_id
    CROSS JOIN clock
    -- Its task, what waits for that, and the rest of its own chain.
    CROSS JOIN LATERAL (
        SELECT least(live.downstream + 1 + coalesce((child.total - child.n) / %(concurrency)s::bigint, 0), 32000)::smallint AS n
    ) AS length
    WHERE live.id = %(id)s::text
    ORDER BY child.n
    RETURNING id, dag_id, status, lane_id, submission_no
),
linked AS (
    INSERT INTO lineshaft.edge (task_id, depends_on, kind, satisfied)
    SELECT %(id)s::text, child.id, 'success'::lineshaft.edge_kind, false FROM child
    UNION ALL
    SELECT child.id, child.turn_after, 'ended', false FROM child WHERE child.turn_after IS NOT NULL
),
waiting AS (
    UPDATE lineshaft.task_live AS live SET blocked = total.n, due_at = NULL
    FROM (SELECT count(*)::integer AS n FROM child) AS total
    WHERE live.id = %(id)s::text
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id)
    SELECT clock.now,
        CASE WHEN placed.status = 'READY' THEN '{task.created,task.ready}' ELSE '{task.created}' END::text[],
        placed.id, placed.dag_id
    FROM placed CROSS JOIN clock
    ORDER BY placed.submission_no
)
SELECT
-- include: notify_lanes
FROM placed WHERE status = 'READY' HAVING count(*) > 0
