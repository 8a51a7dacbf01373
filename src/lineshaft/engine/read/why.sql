-- claim_tasks decides what can be claimed; a test compares these answers with it.

-- name: why_task
SELECT
    clock.now, task.id, coalesce(live.status, ended.status)::text AS status,
    live.due_at, live.is_batch, live.parked, live.last_category, live.attempts, task.max_attempts,
    lane.type, lane.required_capabilities, lane.models, coalesce(lane.max_cost_usd, 0)::numeric(14, 6) AS cost_usd,
    live.lock_key,
    held.holder_task_id AS lock_holder, held.agent_id AS lock_agent, held.expires_at AS lock_expires_at,
    held.holder_task_id <> coalesce(live.lock_owner, live.id)
        AND (held.expires_at >= clock.now OR coalesce(holder.is_batch, false)) AS lock_refused,
    dag.id AS dag_id, dag.budget_ceiling_usd, dag.spent_usd, dag.reserved_usd,
    breaker.state::text AS breaker_state, breaker.failures, breaker.opened_at, breaker.forced, breaker.probe_task_id,
    breaker.probe_at, NOT breaker.forced AND breaker.probe_task_id IS NULL AND coalesce(breaker.probe_at < clock.now, false) AS probe_due,
    slowdown.until AS slowed_until, slowdown.reason AS slowed_because,
    -- NULL: there is no daily budget.
    (
        SELECT %(daily_budget)s::numeric - coalesce(sum(
            CASE WHEN spender.spend_day >= day.today THEN spender.spent_on_day_usd ELSE 0 END + spender.reserved_usd
        ), 0)
        FROM (SELECT (clock.now AT TIME ZONE 'UTC')::date AS today) AS day
        LEFT JOIN lineshaft.agent AS spender ON spender.spend_day > day.today - 31
    ) AS left_today_usd,
    ARRAY(SELECT pause.type FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused,
    ARRAY(SELECT pause.reason FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused_because,
    gated.gate, gated.gate_no, jsonb_array_length(task.gates) AS gates, gated.gate_since, gated.gate_due_at, gated.gate_runs, gated.gate_error
FROM lineshaft.task
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.attempt AS gated ON gated.task_id = live.id AND gated.epoch = live.epoch AND gated.outcome = 'validating'
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
LEFT JOIN lineshaft.lane ON lane.id = live.lane_id
LEFT JOIN lineshaft.lock AS held ON held.key = live.lock_key
LEFT JOIN lineshaft.task_live AS holder ON holder.id = held.holder_task_id
LEFT JOIN lineshaft.dag ON dag.id = live.dag_id
LEFT JOIN lineshaft.breaker ON breaker.key = lane.type AND breaker.state <> 'closed'
LEFT JOIN lineshaft.slowdown ON slowdown.key = '*' AND slowdown.until > clock.now
WHERE task.id = %(id)s::text

-- name: why_models
-- Models and providers that no claim uses now. until: the end of a slowdown; NULL: a breaker is open, and no probe is due.
SELECT key, until
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now())
UNION ALL
SELECT key, NULL FROM lineshaft.breaker
WHERE state <> 'closed' AND (forced OR probe_task_id IS NOT NULL OR coalesce(probe_at >= coalesce(%(now)s::timestamptz, now()), true))

-- name: why_agents
-- An agent that asks for itself is alive, however old its last heartbeat is.
SELECT id,
    CASE WHEN %(agent_id)s::text IS NULL THEN
    -- include: agent_status
    ELSE coalesce(set_status, status)::text END AS status, types, capabilities, models_available, held, max_concurrent_tasks,
    budget_usd - spent_usd - reserved_usd AS money
FROM lineshaft.agent
WHERE %(agent_id)s::text IS NULL OR id = %(agent_id)s::text
ORDER BY id
