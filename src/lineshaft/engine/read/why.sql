-- claim_tasks decides what can be claimed; a test compares these answers with it.

-- name: why_task
SELECT
    clock.now, task.id, coalesce(live.status, ended.status)::text AS status,
    live.due_at, wait.name AS wait_name, wait.signal AS wait_signal, wait.until AS wait_until, live.is_batch, live.parked, live.last_category, coalesce(live.attempts, ended.attempts) AS attempts, task.max_attempts,
    coalesce(live.agent_id, ended.agent_id) AS holder, instance.name AS instance,
    coalesce(live.claimed_at, ended.claimed_at) AS claimed_at, coalesce(live.started_at, ended.started_at) AS started_at,
    live.heartbeat_at, live.lease_until, live.limit_sec, left(live.progress::text, 300) AS progress,
    ended.ended_at, ended.category AS end_category, ended.cost_usd AS spent_in_all_usd,
    lane.type, lane.required_capabilities, lane.models,
    lineshaft.reservation_2(attempt.limit_usd, limits.default_max_cost_usd)::numeric(20, 6) AS cost_usd,
    -- A late report may have used up a part of the task's total: until its next attempt, a claim needs what its lane says.
    lineshaft.needed_1(greatest(attempt.limit_usd, lane.cost_from_usd), limits.default_max_cost_usd) AS needed_usd, attempt.limit_usd IS NULL AS open_ended,
    lineshaft.is_expired_1(live.expires, live.deadline, clock.now) AS expired,
    CASE WHEN live.id IS NULL THEN task.deadline ELSE live.deadline END AS deadline, ended.reason AS end_reason,
    -- Of a task with a list that doesn't exist yet.
    task.for_each->>'over' AS list,
    live.is_batch AND NOT EXISTS (
        SELECT FROM lineshaft.edge
        WHERE edge.task_id = task.id AND (SELECT child.parent_id FROM lineshaft.task AS child WHERE child.id = edge.depends_on) = task.id
    ) AS is_childless,
    -- Of a child of a list: how many of its children run at once.
    (SELECT batch.for_each->>'concurrency' FROM lineshaft.task AS batch WHERE batch.id = task.parent_id) AS turns,
    coalesce(refused.key, live.lock_key) AS lock_key,
    held.holder_task_id AS lock_holder, held.agent_id AS lock_agent, held.expires_at AS lock_expires_at,
    CASE
        WHEN live.admission ? 'locks' THEN refused.key IS NOT NULL
        ELSE
        -- include: lock_refused
    END AS lock_refused,
    CASE WHEN held.holder_task_id LIKE 'shared:%%' THEN ARRAY(
        SELECT share.holder_task_id FROM lineshaft.lock_share AS share WHERE share.key = held.key ORDER BY share.holder_task_id LIMIT 100
    ) END AS lock_readers,
    live.admission -> 'locks' ->> coalesce(refused.key, live.lock_key) = 'true' AS lock_shared,
    CASE WHEN held.holder_task_id LIKE 'shared:%%' THEN (
        SELECT writer.id FROM lineshaft.task_live AS writer
        WHERE writer.lock_key = held.key
          AND writer.parked = 'lock' AND (writer.admission -> 'locks' ->> writer.lock_key) IS DISTINCT FROM 'true'
        LIMIT 1
    ) END AS lock_writer,
    dag.id AS dag_id, dag.budget_ceiling_usd, dag.spent_usd, dag.reserved_usd,
    -- include: barriers_of_type
    ,
    CASE WHEN live.status = 'READY' AND limits.quota_kinds & 49 <> 0 THEN lineshaft.full_quotas_1(
        lineshaft.lane_keys_1(lane.type, NULL, NULL, NULL) || lineshaft.parking_keys_1(live.admission, task.tags), clock.now
    ) END AS full_quotas,
    CASE WHEN live.status = 'READY' THEN live.admission ->> 'fair' END AS fair_key,
    CASE WHEN live.status = 'READY' AND live.admission ? 'fair' THEN lineshaft.fair_held_1(live.admission ->> 'fair') END AS fair_held,
    gated.gate, gated.gate_no, jsonb_array_length(task.gates) AS gates, gated.gate_since, gated.gate_due_at, gated.gate_runs, gated.gate_error,
    gated.gate_blocked_by, limits.judge_max_cost_usd, task.max_total_cost_usd, live.cost_usd AS spent_so_far_usd, gated.agent_id AS paying_agent,
    paying.budget_usd - paying.spent_usd - paying.reserved_usd AS agent_left_usd,
    CASE WHEN live.status = 'PENDING' AND live.due_at IS NOT NULL AND task.idempotency_key IS NOT NULL THEN (
        SELECT max(event.at) FROM lineshaft.event WHERE event.task_id = task.id AND 'task.replaced' = ANY (event.kinds)
    ) END AS replaced_at
FROM lineshaft.task
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
CROSS JOIN lineshaft.limits
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
CROSS JOIN LATERAL (SELECT lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd) AS limit_usd) AS attempt
LEFT JOIN lineshaft.attempt AS gated ON gated.task_id = live.id AND gated.epoch = live.epoch AND gated.outcome = 'validating'
LEFT JOIN lineshaft.agent AS paying ON paying.id = gated.agent_id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
LEFT JOIN lineshaft.instance
    ON instance.agent_id = coalesce(live.agent_id, ended.agent_id)
    AND instance.incarnation = coalesce(live.incarnation, ended.incarnation)
LEFT JOIN lineshaft.wait ON wait.task_id = live.id AND wait.epoch = live.epoch AND live.status = 'PENDING' AND live.due_at IS NOT NULL
LEFT JOIN lineshaft.lane ON lane.id = live.lane_id
LEFT JOIN LATERAL (
    SELECT lineshaft.refused_lock_1(live.id, live.lock_owner, live.lock_key, live.admission -> 'locks', clock.now) AS key
    WHERE live.admission ? 'locks' AND live.status = 'READY'
) AS refused ON true
LEFT JOIN lineshaft.lock AS held ON held.key = coalesce(refused.key, live.lock_key)
LEFT JOIN lineshaft.task_live AS holder ON holder.id = held.holder_task_id
LEFT JOIN lineshaft.dag ON dag.id = live.dag_id
-- include: joined_barriers
WHERE task.id = ANY (%(ids)s::text[])

-- name: why_models
-- Models and providers that no claim uses now. until: the end of a slowdown; NULL: a breaker is open, and no probe is due.
SELECT key, until
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now())
UNION ALL
SELECT key, NULL FROM lineshaft.breaker
WHERE state <> 'closed' AND (forced OR probe_task_id IS NOT NULL OR coalesce(probe_at >= coalesce(%(now)s::timestamptz, now()), true))

-- name: why_full_keys
-- The keys of agents and of models whose quotas have no room.
SELECT asked.key, lineshaft.full_quotas_1(ARRAY[asked.key], coalesce(%(now)s::timestamptz, now())) AS quotas
FROM (
    SELECT 'agent:' || agent_id AS key FROM lineshaft.instance, lineshaft.limits WHERE limits.quota_kinds & 8 <> 0
    UNION
    SELECT 'model:' || model FROM lineshaft.instance, unnest(models_available) AS model, lineshaft.limits WHERE limits.quota_kinds & 2 <> 0
    UNION
    SELECT 'model:' || model FROM lineshaft.lane, unnest(models) AS model, lineshaft.limits WHERE limits.quota_kinds & 2 <> 0
) AS asked
WHERE lineshaft.room_for_1(ARRAY[asked.key], coalesce(%(now)s::timestamptz, now())) <= 0

-- name: why_agents
-- The instances of all agents that may be alive, or only one that asks for itself: that one is alive, however old its last heartbeat is.
SELECT agent.id,
    CASE
        WHEN %(agent_id)s::text IS NULL AND
        -- include: instance_liveness
        = 'offline' THEN 'offline'
        ELSE coalesce(instance.set_status, instance.status)::text
    END AS status,
    instance.types, instance.capabilities, instance.models_available, instance.held,
    slowdown.until AS slowed_until, instance.accounts,
    -- One whose breaker may be probed is open.
    instance.accounts <> '{}' AND lineshaft.open_accounts_1(instance.accounts, due.keys, clock.now) = '{}' AS is_closed,
    lineshaft.accounts_until_1(instance.accounts, clock.now) AS closed_until,
    coalesce(instance.set_max_tasks, instance.max_concurrent_tasks) AS max_concurrent_tasks,
    agent.budget_usd - agent.spent_usd - agent.reserved_usd AS money
FROM lineshaft.instance
JOIN lineshaft.agent ON agent.id = instance.agent_id
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
CROSS JOIN LATERAL (
    SELECT ARRAY(
        SELECT key FROM lineshaft.breaker
        WHERE state <> 'closed' AND NOT forced AND probe_task_id IS NULL AND probe_at < clock.now AND key LIKE 'account:%%'
    ) AS keys
) AS due
LEFT JOIN lineshaft.slowdown ON slowdown.key = 'agent:' || instance.agent_id AND slowdown.until > clock.now
WHERE %(agent_id)s::text IS NULL OR (agent.id = %(agent_id)s::text AND instance.incarnation = %(incarnation)s::integer)
ORDER BY agent.id, instance.incarnation
