-- What people and programs look at: tasks, DAGs, why a task waits, guards. Used by queries.py. Nothing here writes.
--
-- The statements of one answer run in one snapshot, so that a task is not both READY in the list and RUNNING in its object. Lists are made
-- in two steps: listing.sql finds which tasks, read_tasks makes the objects.

-- name: snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: plan_for_filters
-- For statements with optional filters: what isn't asked for is left out of the plan, joins included. The pool's setting, one plan for
-- all and no hash joins, is for the hot path. Its others stay: a large table is read by index wherever there is one. Parallel workers
-- start up in the time that a page takes, and would be taken from others.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_hashjoin', 'on', true),
    set_config('max_parallel_workers_per_gather', '0', true)

-- name: read_tasks
-- All columns of these tasks, whichever table they live in; what belongs to several rows is read by the statements below.
SELECT
    clock.now,
    task.id, task.dag_id, task.parent_id, task.idempotency_key, task.type, task.title, task.spec, task.preset,
    task.required_capabilities, task.model_preferences, task.fallback_models, task.max_cost_usd, task.max_total_cost_usd,
    task.max_duration_sec, task.heartbeat_interval_sec, task.priority_boost_per_minute, task.lock_key, task.max_attempts, task.retry,
    task.gates, task.require_decision_report, task.is_batch, task.tags, task.created_by, task.created_at, task.surface,
    coalesce(live.status, ended.status)::text AS status,
    coalesce(live.priority, task.priority) AS priority,
    CASE WHEN live.id IS NULL THEN task.deadline ELSE live.deadline END AS deadline,
    live.downstream,
    CASE WHEN live.status = 'PENDING' THEN coalesce(live.due_at, task.run_at) ELSE task.run_at END AS run_at,
    CASE WHEN live.status = 'RETRYING' THEN live.due_at END AS retry_at,
    coalesce(live.blocked, 0) AS blocked,
    live.parked,
    coalesce(live.epoch, ended.epoch) AS epoch,
    coalesce(live.attempts, ended.attempts) AS attempts,
    coalesce(live.revivals, ended.revivals) AS revivals,
    coalesce(live.agent_id, ended.agent_id) AS agent_id,
    coalesce(live.model, ended.model) AS model,
    coalesce(live.claimed_at, ended.claimed_at) AS claimed_at,
    live.heartbeat_at,
    live.lease_until,
    coalesce(live.heartbeat_sec, task.heartbeat_interval_sec, agent.heartbeat_interval_sec, 30) AS heartbeat_in_force,
    coalesce(live.ready_at, ended.ready_at) AS ready_at,
    -- Of the attempt under way, else of the first one there was. A batch has none: it began with the first of what is in it (R-192).
    CASE WHEN NOT task.is_batch THEN coalesce(live.started_at, live.first_started_at, ended.started_at, ended.first_started_at)
        ELSE (
            WITH RECURSIVE inside AS (
                SELECT child.id, child.is_batch FROM lineshaft.task AS child WHERE child.parent_id = task.id
                UNION ALL
                SELECT child.id, child.is_batch
                FROM inside JOIN lineshaft.task AS child ON child.parent_id = inside.id AND inside.is_batch
            )
            SELECT min(coalesce(going.first_started_at, gone.first_started_at))
            FROM inside
            LEFT JOIN lineshaft.task_live AS going ON going.id = inside.id
            LEFT JOIN lineshaft.task_end AS gone ON gone.id = inside.id
        ) END AS started_at,
    ended.ended_at,
    ended.reason,
    ended.category,
    (coalesce(live.cost_usd + live.attempt_cost_usd, ended.cost_usd))::numeric(14, 6) AS cost_usd,
    coalesce(live.reserved_usd, 0) AS reserved_usd,
    coalesce(live.tokens_input, ended.tokens_input) AS tokens_input,
    coalesce(live.tokens_output, ended.tokens_output) AS tokens_output,
    live.progress,
    -- What is being validated is with its attempt: whoever decides about it must see it.
    coalesce(CASE WHEN live.status = 'VALIDATING' THEN handed_in.output ->> 'type' ELSE ended.output_type END, task.output_type) AS output_type,
    CASE WHEN live.status = 'VALIDATING' THEN handed_in.output -> 'data' ELSE ended.output END AS data,
    CASE WHEN live.status = 'VALIDATING' THEN nullif(handed_in.output -> 'artifacts', 'null') ELSE ended.artifacts END AS artifacts,
    CASE WHEN live.status = 'VALIDATING' THEN nullif(handed_in.output -> 'decision_report', 'null')
        ELSE ended.decision_report END AS decision_report
FROM lineshaft.task
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
LEFT JOIN lineshaft.agent ON agent.id = coalesce(live.agent_id, ended.agent_id)
LEFT JOIN lineshaft.attempt AS handed_in
    ON live.status = 'VALIDATING' AND handed_in.task_id = live.id AND handed_in.epoch = live.epoch
WHERE task.id = ANY (%(ids)s::text[])

-- name: read_edges
SELECT task_id, depends_on, satisfied FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) ORDER BY task_id, depends_on

-- name: read_failures
-- Attempts that failed, and waits for a rate limit, which are no failures (U13) but tell why a task is RETRYING.
SELECT task_id, number, revival, outcome, agent_id, category, error, claimed_at, started_at, ended_at, cost_usd
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome IN ('failed', 'rate_limited')
ORDER BY task_id, epoch

-- name: upstream
-- Everything that these tasks wait for, directly or not, as open edges with how the upstream ended. The recursion stops with the limit: it
-- runs only as far as rows are asked for.
WITH RECURSIVE open_edge AS (
    SELECT task_id, depends_on FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) AND NOT satisfied
    UNION
    SELECT edge.task_id, edge.depends_on
    FROM open_edge JOIN lineshaft.edge ON edge.task_id = open_edge.depends_on AND NOT edge.satisfied
)
SELECT open_edge.task_id, open_edge.depends_on, coalesce(ended.status, live.status)::text AS status, live.due_at
FROM open_edge
LEFT JOIN lineshaft.task_end AS ended ON ended.id = open_edge.depends_on
LEFT JOIN lineshaft.task_live AS live ON live.id = open_edge.depends_on
LIMIT %(most)s::integer

-- name: attempts
-- The table has those that ended without success or are being validated; the one under way and the one that succeeded are told by the
-- task's own row. Money and tokens of the latter are what the others leave of the task's totals.
WITH recorded AS MATERIALIZED (
    SELECT * FROM lineshaft.attempt WHERE task_id = %(id)s::text
),
own AS MATERIALIZED (
    SELECT live.epoch, live.attempts + 1 AS number, live.revivals AS revival, live.agent_id, live.model, 'running' AS outcome,
        live.claimed_at, live.started_at, NULL::timestamptz AS ended_at, live.attempt_cost_usd AS cost_usd,
        0::numeric AS tokens_input, 0::numeric AS tokens_output, NULL::jsonb AS output
    FROM lineshaft.task_live AS live
    WHERE live.id = %(id)s::text AND live.status IN ('CLAIMED', 'RUNNING')
    UNION ALL
    SELECT ended.epoch, ended.attempts + 1, ended.revivals, ended.agent_id, ended.model, 'completed',
        ended.claimed_at, ended.started_at, ended.ended_at, ended.cost_usd - earlier.cost_usd,
        ended.tokens_input - earlier.tokens_input, ended.tokens_output - earlier.tokens_output,
        jsonb_build_object('data', ended.output, 'artifacts', ended.artifacts, 'decision_report', ended.decision_report)
    FROM lineshaft.task_end AS ended
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(cost_usd), 0) AS cost_usd, coalesce(sum(tokens_input), 0) AS tokens_input,
            coalesce(sum(tokens_output), 0) AS tokens_output
        FROM recorded WHERE recorded.epoch < ended.epoch
    ) AS earlier
    -- A batch has no attempts of its own.
    WHERE ended.id = %(id)s::text AND ended.status = 'COMPLETED' AND ended.claimed_at IS NOT NULL
)
SELECT epoch, number::integer AS number, revival::integer AS revival, agent_id, model, outcome, category, error, claimed_at, started_at,
    ended_at, cost_usd::numeric(14, 6) AS cost_usd, tokens_input::bigint AS tokens_input, tokens_output::bigint AS tokens_output, output
FROM (
    SELECT epoch, number, revival, agent_id, model, outcome, category, error, claimed_at, started_at, ended_at, cost_usd, tokens_input,
        tokens_output, output
    FROM recorded WHERE recorded.epoch NOT IN (SELECT own.epoch FROM own)
    UNION ALL
    SELECT epoch, number, revival, agent_id, model, outcome, NULL, NULL, claimed_at, started_at, ended_at, cost_usd, tokens_input,
        tokens_output, output
    FROM own
) AS attempt
ORDER BY epoch

-- name: steps
SELECT name, data FROM lineshaft.step WHERE task_id = %(id)s::text ORDER BY recorded_at, name

-- name: task_exists
SELECT FROM lineshaft.task WHERE id = %(id)s::text

-- name: read_dags
SELECT id, title, status::text AS status, created_by, budget_ceiling_usd, reserved_usd, spent_usd, created_at, ended_at AS completed_at
FROM lineshaft.dag
WHERE id = ANY (%(ids)s::text[])

-- name: dag_members
SELECT task.dag_id, task.id, coalesce(live.status, ended.status)::text AS status, task.title, task.created_by, task.created_at,
    coalesce(live.epoch, ended.epoch) AS epoch, ended.ended_at,
    coalesce(live.cost_usd, ended.cost_usd) AS spent_usd, coalesce(live.reserved_usd, 0::numeric(14, 6)) AS reserved_usd
FROM lineshaft.task
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE task.dag_id = ANY (%(ids)s::text[])
ORDER BY task.dag_id, task.id

-- name: dag_edges
SELECT edge.task_id, edge.depends_on
FROM lineshaft.task
JOIN lineshaft.edge ON edge.task_id = task.id
WHERE task.dag_id = ANY (%(ids)s::text[])
ORDER BY edge.task_id, edge.depends_on

-- Why a task is not running. What makes one claimable is decided by claim_tasks; a test holds these answers against it.

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
    -- What is left of the day's budget; NULL: there is none.
    (
        SELECT %(daily_budget)s::numeric - coalesce(sum(
            CASE WHEN purse.spend_day >= day.today THEN purse.spent_on_day_usd ELSE 0 END + purse.reserved_usd
        ), 0)
        FROM (SELECT (clock.now AT TIME ZONE 'UTC')::date AS today) AS day
        LEFT JOIN lineshaft.agent AS purse ON purse.spend_day > day.today - 31
    ) AS left_today_usd,
    ARRAY(SELECT pause.type FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused,
    ARRAY(SELECT pause.reason FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused_because,
    -- Where its output is, while that is validated.
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
-- Models and providers that no claim uses now: until when, if they were slowed down; NULL: a breaker is open, and no probe is due.
SELECT key, until
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now())
UNION ALL
SELECT key, NULL FROM lineshaft.breaker
WHERE state <> 'closed' AND (forced OR probe_task_id IS NOT NULL OR coalesce(probe_at >= coalesce(%(now)s::timestamptz, now()), true))

-- name: why_agents
SELECT id, status::text AS status, types, capabilities, models_available, held, max_concurrent_tasks,
    budget_usd - spent_usd - reserved_usd AS money
FROM lineshaft.agent
ORDER BY id

-- Guards.

-- name: locks
-- With how many READY tasks want each, through task_live_wants_lock, counted up to `most`. Those of the batch that holds a lock don't wait
-- for it.
SELECT held.key, held.holder_task_id, held.agent_id, held.token, held.acquired_at, held.expires_at,
    (
        SELECT count(*) FROM (
            SELECT FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.lock_key = held.key
              AND coalesce(live.lock_owner, live.id) <> held.holder_task_id
            LIMIT %(most)s::integer
        ) AS wanting
    )::integer AS waiting
FROM lineshaft.lock AS held
WHERE %(after)s::text IS NULL OR held.key > %(after)s::text
ORDER BY held.key
LIMIT %(limit)s::integer

-- name: breakers
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced
FROM lineshaft.breaker
WHERE %(after)s::text IS NULL OR key > %(after)s::text
ORDER BY key
LIMIT %(limit)s::integer

-- name: breaker
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced
FROM lineshaft.breaker WHERE key = %(key)s::text

-- name: slowdowns
-- Those in force.
SELECT key, until, reason, signalled_at
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now()) AND (%(after)s::text IS NULL OR key > %(after)s::text)
ORDER BY key
LIMIT %(limit)s::integer

-- name: pauses
SELECT type, since FROM lineshaft.pause ORDER BY type
