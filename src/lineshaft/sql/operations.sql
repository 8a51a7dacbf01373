-- What people and parents do to tasks: cancel, retry by hand, spawn, add dependencies, change priority. Used by store/operations.py.

-- name: lock_edges
-- Edges between existing tasks are added one transaction at a time, so that two of them can't close a cycle together.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.edges', 0))

-- name: upstream_of
-- Everything that these tasks wait for, directly or not, as edges.
WITH RECURSIVE upstream AS (
    SELECT task_id, depends_on FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) AND NOT satisfied
    UNION
    SELECT edge.task_id, edge.depends_on
    FROM upstream JOIN lineshaft.edge ON edge.task_id = upstream.depends_on AND NOT edge.satisfied
)
SELECT task_id, depends_on FROM upstream

-- name: existing_edges
SELECT depends_on FROM lineshaft.edge WHERE task_id = %(id)s::text

-- name: block_task
-- More to wait for: READY goes back to PENDING.
UPDATE lineshaft.task_live
SET blocked = blocked + %(n)s::integer,
    status = CASE WHEN blocked + %(n)s::integer > 0 THEN 'PENDING' ELSE status END::lineshaft.task_status,
    parked = CASE WHEN blocked + %(n)s::integer > 0 THEN NULL ELSE parked END
WHERE id = %(id)s::text AND status IN ('PENDING', 'READY')

-- name: join_dag
-- A virtual DAG becomes real when a second task joins it.
UPDATE lineshaft.task_live SET dag_id = %(dag_id)s::text WHERE id = %(id)s::text

-- name: read_revivable
-- What a revival needs to know: the lane of the task's own preferences, its key, and whether it is a batch.
SELECT task.id, ended.status::text AS status, task.type, task.required_capabilities, task.model_preferences,
    task.priority_boost_per_minute, task.max_cost_usd, task.idempotency_key, task.spec, task.is_batch, task.parent_id, task.lock_key,
    dag.id AS dag_id
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
WHERE ended.id = ANY (%(ids)s::text[])
ORDER BY ended.id
FOR UPDATE OF ended

-- name: resolve_dead_letters
UPDATE lineshaft.dead_letter
SET reviewed = true, resolution = 'retry', reviewed_at = coalesce(%(now)s::timestamptz, now())
WHERE task_id = ANY (%(ids)s::text[]) AND NOT reviewed

-- name: promote_retry
-- RETRYING → READY by hand, counters kept.
UPDATE lineshaft.task_live AS live
SET status = 'READY', due_at = NULL, ready_at = coalesce(live.ready_at, clock.now), generation = (SELECT last_value FROM lineshaft.generation_no),
    rank = lineshaft.rank(live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now)
FROM lineshaft.lane, (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = %(id)s::text AND live.status = 'RETRYING' AND lane.id = live.lane_id
RETURNING live.id, live.dag_id, live.lane_id
