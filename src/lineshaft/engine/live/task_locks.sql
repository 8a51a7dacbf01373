-- name: lock_dependents
-- Comes before a statement that ends tasks. If others wait for these tasks, all of them are locked together in the order of their ids, so
-- that two transitions of neighbours in a DAG wait for each other instead of deadlocking. A task without dependents, as most are, costs
-- one index look-up.
WITH waiting AS MATERIALIZED (
    SELECT edge.task_id AS id FROM lineshaft.edge WHERE edge.depends_on = ANY (%(ids)s::text[]) AND NOT edge.satisfied
)
SELECT count(*)
FROM (
    SELECT
    FROM lineshaft.task_live AS live
    WHERE live.id = ANY (ARRAY(
        SELECT id FROM waiting
        UNION
        SELECT unnest(%(ids)s::text[]) WHERE EXISTS (SELECT FROM waiting)
    ))
    ORDER BY live.id
    FOR UPDATE
) AS locked

-- name: lock_tasks
-- Everything that decides about a transition, in the one order in which rows of tasks are locked.
SELECT
    live.id, live.epoch, live.status::text AS status, live.dag_id, live.agent_id, live.incarnation, live.reserved_usd, live.agent_reserved, live.day_reserved, live.cost_usd, live.attempt_cost_usd,
    live.attempt_tokens_input, live.attempt_tokens_output,
    live.tokens_input, live.tokens_output, live.attempts, live.rate_limits, live.revivals, live.claimed_at, live.started_at,
    live.first_started_at, live.ready_at, live.lease_until, live.limit_at, live.lock_key, live.lock_owner, live.lock_token, live.lane_id, live.model, live.version, live.account, live.long_waits, live.is_batch,
    live.blocked, live.progress, live.is_gated, task.type, task.title, task.parent_id, task.dag_id AS task_dag_id, task.preset, task.retry,
    task.max_attempts, task.max_cost_usd, task.max_total_cost_usd, task.required_capabilities, task.model_preferences,
    task.fallback_models, task.priority_boost_per_minute, task.gates, task.require_decision_report, task.idempotency_key,
    coalesce(live.heartbeat_sec, 30) AS heartbeat_sec,
    live.has_slots OR (live.status = 'READY' AND (
        SELECT limits.quota_kinds & 16 <> 0 OR (limits.quota_kinds & 32 <> 0 AND live.admission IS NOT NULL) FROM lineshaft.limits
    )) AS concerns_quotas,
    CASE WHEN live.lock_key IS NOT NULL THEN (
        SELECT jsonb_object_agg(needed.key, needed.holder)
        FROM lineshaft.locks_of_1(live.id, live.lock_owner, live.lock_key, live.admission -> 'locks') AS needed
    ) END AS lock_holders
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = ANY (%(ids)s::text[])
ORDER BY live.id
FOR UPDATE OF live

-- name: kept_locks
-- Those of these locked tasks that still have all document locks that their claims were given.
SELECT lineshaft.keep_locks_1(%(ids)s::text[])

-- name: read_live
SELECT id, epoch, status::text AS status FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[])

-- name: read_ends
SELECT id, epoch, status::text AS status, category FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])

-- name: ended_by
-- Claims that ended by a call of their holder: a repeated call has the first one's result, every other call is stale.
SELECT attempt.task_id
FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS claim (id, epoch)
JOIN lineshaft.attempt ON attempt.task_id = claim.id AND attempt.epoch = claim.epoch
WHERE attempt.ended_by = %(call)s::text

-- name: children
-- Of a task with a list: those of the present list, for which it waits. It has others if the task that returned the list has run again.
SELECT child.id, child.parent_id
FROM lineshaft.task AS child JOIN lineshaft.task AS parent ON parent.id = child.parent_id
WHERE child.parent_id = ANY (%(ids)s::text[])
  AND (
    parent.for_each IS NULL
    OR EXISTS (SELECT FROM lineshaft.edge WHERE edge.task_id = parent.id AND edge.depends_on = child.id)
  )

-- name: log_late_results
-- Outputs of superseded claims: refused, but kept for people to read.
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, epoch, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{task.late_result}', task.id, task.dag_id, input.epoch,
    jsonb_build_object('output', input.output)
FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(outputs)s::jsonb[]) AS input (id, epoch, output)
JOIN lineshaft.task ON task.id = input.id
