-- Where tasks stand, locked or not. Used by store/standing.py.

-- name: lock_dependents
-- Comes before whatever ends tasks. If anything waits for them, they and what waits are locked together in the order of their ids, so
-- that two transitions that meet on neighbours of a DAG wait for each other instead of deadlocking. Tasks that nobody waits for,
-- most of them, cost one index look-up each.
WITH waiting AS MATERIALIZED (
    SELECT edge.task_id AS id FROM lineshaft.edge WHERE edge.depends_on = ANY (%(ids)s::text[]) AND NOT edge.satisfied
)
SELECT live.id
FROM lineshaft.task_live AS live
WHERE live.id = ANY (ARRAY(
    SELECT id FROM waiting
    UNION
    SELECT unnest(%(ids)s::text[]) WHERE EXISTS (SELECT FROM waiting)
))
ORDER BY live.id
FOR UPDATE

-- name: lock_tasks
-- All that decides what becomes of a task, in the one order in which rows of tasks are locked.
SELECT
    live.id, live.epoch, live.status::text AS status, live.dag_id, live.agent_id, live.reserved_usd, live.cost_usd, live.attempt_cost_usd,
    live.tokens_input, live.tokens_output, live.attempts, live.rate_limits, live.revivals, live.claimed_at, live.started_at,
    live.first_started_at, live.ready_at, live.lease_until, live.limit_at, live.lock_key, live.lock_owner, live.lane_id, live.model, live.is_batch,
    live.blocked, live.progress, live.is_gated, task.type, task.title, task.parent_id, task.dag_id AS task_dag_id, task.preset, task.retry,
    task.max_attempts, task.max_cost_usd, task.max_total_cost_usd, task.required_capabilities, task.model_preferences,
    task.fallback_models, task.priority_boost_per_minute, task.gates, task.require_decision_report, task.idempotency_key,
    coalesce(live.heartbeat_sec, 30) AS heartbeat_sec
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = ANY (%(ids)s::text[])
ORDER BY live.id
FOR UPDATE OF live

-- name: read_live
SELECT id, epoch, status::text FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[])

-- name: read_ends
-- Tasks that are not live: how they ended, and by which claim.
SELECT id, epoch, status::text AS status, reason, category, agent_id FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])

-- name: log_late_result
-- What a superseded claim wanted to hand in: refused, but kept for people to look at (R-100).
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, epoch, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{task.late_result}', task.id, task.dag_id, %(epoch)s::integer,
    jsonb_build_object('output', %(output)s::jsonb)
FROM lineshaft.task WHERE task.id = %(id)s::text
