-- name: read_tasks
-- All columns of these tasks, live or ended.
SELECT
    clock.now,
    task.id, task.dag_id, task.parent_id, task.idempotency_key, task.type, task.title, task.spec, task.inputs, task.for_each, task.key, task.preset,
    task.required_capabilities, task.model_preferences, task.fallback_models, task.max_cost_usd, task.max_total_cost_usd,
    task.max_duration_sec, task.heartbeat_interval_sec, task.priority_boost_per_minute, task.lock_key, task.admission, task.max_attempts, task.retry,
    task.expire_at_deadline,
    CASE WHEN task.ignore_failure THEN 'ignore' WHEN task.parent_id IS NOT NULL THEN 'block' END AS on_failure,
    -- Stored with the key, as long as that is the task's.
    (
        SELECT task_key.ttl_sec FROM lineshaft.task_key WHERE task_key.key = task.idempotency_key AND task_key.task_id = task.id
    ) AS idempotency_ttl_sec,
    task.gates, task.require_decision_report, task.is_batch, task.tags, task.created_by, task.created_by_token, task.created_at, task.surface,
    coalesce(live.status, ended.status)::text AS status,
    coalesce(live.priority, task.priority) AS priority,
    CASE WHEN live.id IS NULL THEN task.deadline ELSE live.deadline END AS deadline,
    live.downstream,
    CASE
        -- What waits for a signal without a time limit is due in a year, to be looked at.
        WHEN live.status = 'PENDING' AND live.due_at IS NOT NULL AND live.epoch > 0
            AND EXISTS (SELECT FROM lineshaft.wait WHERE wait.task_id = live.id AND wait.epoch = live.epoch AND wait.until IS NULL)
        THEN task.run_at
        WHEN live.status = 'PENDING' THEN coalesce(live.due_at, task.run_at)
        ELSE task.run_at
    END AS run_at,
    CASE WHEN live.status = 'RETRYING' THEN live.due_at END AS retry_at,
    coalesce(live.blocked, 0) AS blocked,
    -- Others have it from the start, if they have a fair_key.
    CASE WHEN live.status = 'READY' THEN live.parked END AS parked,
    coalesce(live.epoch, ended.epoch) AS epoch,
    coalesce(live.attempts, ended.attempts) AS attempts,
    coalesce(live.revivals, ended.revivals) AS revivals,
    coalesce(live.agent_id, ended.agent_id) AS agent_id,
    instance.name AS instance,
    coalesce(live.model, ended.model) AS model,
    coalesce(live.claimed_at, ended.claimed_at) AS claimed_at,
    live.heartbeat_at,
    live.lease_until,
    -- Not live.heartbeat_sec, which has less precision.
    coalesce(task.heartbeat_interval_sec, instance.heartbeat_interval_sec, 30) AS heartbeat_in_force,
    coalesce(live.ready_at, ended.ready_at) AS ready_at,
    -- When the current attempt started, else the last one. A batch has no attempts: it started with the first of its descendants.
    CASE WHEN NOT task.is_batch THEN coalesce(live.started_at, ended.started_at, (
            SELECT attempt.started_at FROM lineshaft.attempt
            WHERE attempt.task_id = task.id AND attempt.started_at IS NOT NULL ORDER BY attempt.epoch DESC LIMIT 1
        ))
        ELSE (
            WITH RECURSIVE inside AS (
                SELECT child.id, child.is_batch FROM lineshaft.task AS child WHERE child.parent_id = task.id
                UNION ALL
                SELECT child.id, child.is_batch
                FROM inside
                -- OFFSET 0: one look-up for each batch, whatever the planner thinks of the number of tasks.
                CROSS JOIN LATERAL (
                    SELECT id, is_batch FROM lineshaft.task WHERE parent_id = inside.id AND inside.is_batch OFFSET 0
                ) AS child
            )
            SELECT min(coalesce(going.first_started_at, gone.first_started_at))
            FROM inside
            LEFT JOIN lineshaft.task_live AS going ON going.id = inside.id
            LEFT JOIN lineshaft.task_end AS gone ON gone.id = inside.id
        ) END AS started_at,
    coalesce(live.first_started_at, ended.first_started_at) AS first_started_at,
    ended.ended_at,
    ended.reason,
    ended.category,
    (coalesce(live.cost_usd + live.attempt_cost_usd, ended.cost_usd))::numeric(20, 6) AS cost_usd,
    (
        SELECT coalesce(sum(reported_usd - ceiling_usd - decided_usd), 0) FROM lineshaft.cost_dispute WHERE cost_dispute.task_id = task.id
    )::numeric(20, 6) AS disputed_usd,
    coalesce(live.reserved_usd, 0) AS reserved_usd,
    coalesce(live.tokens_input + live.attempt_tokens_input, ended.tokens_input) AS tokens_input,
    coalesce(live.tokens_output + live.attempt_tokens_output, ended.tokens_output) AS tokens_output,
    live.progress,
    -- An output in validation is stored with its attempt; a reviewer must see it.
    coalesce(CASE WHEN live.status = 'VALIDATING' THEN candidate.output ->> 'type' ELSE ended.output_type END, task.output_type) AS output_type,
    CASE WHEN live.status = 'VALIDATING' THEN candidate.output -> 'data' ELSE ended.output END AS data,
    CASE WHEN live.status = 'VALIDATING' THEN nullif(candidate.output -> 'artifacts', 'null') ELSE ended.artifacts END AS artifacts,
    CASE WHEN live.status = 'VALIDATING' THEN nullif(candidate.output -> 'decision_report', 'null')
        ELSE ended.decision_report END AS decision_report
FROM lineshaft.task
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
LEFT JOIN lineshaft.instance
    ON instance.agent_id = coalesce(live.agent_id, ended.agent_id)
    AND instance.incarnation = coalesce(live.incarnation, ended.incarnation)
LEFT JOIN lineshaft.attempt AS candidate
    ON live.status = 'VALIDATING' AND candidate.task_id = live.id AND candidate.epoch = live.epoch
WHERE task.id = ANY (%(ids)s::text[])

-- name: read_edges
SELECT task_id, depends_on, satisfied FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) ORDER BY task_id, depends_on

-- name: read_failures
-- Failed attempts, and rate limits: those don't count as failures but explain why a task is RETRYING.
SELECT task_id, number, revival, outcome, agent_id, instance, version, category, error, traceback, claimed_at, started_at, ended_at, cost_usd,
    tokens_input, tokens_output
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome IN ('failed', 'rate_limited')
ORDER BY task_id, epoch

-- name: upstream
-- All open edges upstream of these tasks, with the status of the upstream task. The recursion produces rows on demand, so LIMIT bounds it.
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
-- The table has attempts that ended without success or are in validation; the current and the successful attempt are in the task's own
-- row. Cost and tokens of the successful one are the task's totals minus those of earlier attempts, and without corrections.
WITH recorded AS MATERIALIZED (SELECT * FROM lineshaft.attempt WHERE task_id = %(id)s::text),
own AS MATERIALIZED (
    SELECT live.epoch, live.attempts + 1 AS number, live.revivals AS revival, live.agent_id,
        (SELECT name FROM lineshaft.instance WHERE agent_id = live.agent_id AND incarnation = live.incarnation) AS instance, live.model, live.version, live.account, 'running' AS outcome,
        live.claimed_at, live.started_at, NULL::timestamptz AS ended_at, live.attempt_cost_usd AS cost_usd,
        live.attempt_tokens_input::numeric AS tokens_input, live.attempt_tokens_output::numeric AS tokens_output, NULL::jsonb AS output
    FROM lineshaft.task_live AS live
    WHERE live.id = %(id)s::text AND live.status IN ('CLAIMED', 'RUNNING')
    UNION ALL
    SELECT ended.epoch, ended.attempts + 1, ended.revivals, ended.agent_id,
        (SELECT name FROM lineshaft.instance WHERE agent_id = ended.agent_id AND incarnation = ended.incarnation), ended.model, ended.version, ended.account, 'completed',
        ended.claimed_at, ended.started_at, ended.ended_at, ended.cost_usd - lineshaft.corrected_1(ended.id) - earlier.cost_usd,
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
SELECT epoch, number::integer AS number, revival::integer AS revival, agent_id, instance, model, version, account, outcome, category, error, traceback,
    claimed_at, started_at, ended_at, cost_usd::numeric(20, 6) AS cost_usd, tokens_input::bigint AS tokens_input, tokens_output::bigint AS tokens_output,
    CASE WHEN %(outputs)s::boolean THEN output END AS output
FROM (
    SELECT epoch, number, revival, agent_id, instance, model, version, account, outcome, category, error, traceback, claimed_at, started_at, ended_at, cost_usd,
        tokens_input, tokens_output, output
    FROM recorded WHERE recorded.epoch NOT IN (SELECT own.epoch FROM own)
    UNION ALL
    SELECT epoch, number, revival, agent_id, instance, model, version, account, outcome, NULL, NULL, NULL, claimed_at, started_at, ended_at, cost_usd, tokens_input,
        tokens_output, output
    FROM own
) AS attempt
ORDER BY epoch

-- name: steps
SELECT name, data FROM lineshaft.step WHERE task_id = %(id)s::text ORDER BY recorded_at, name

-- name: task_exists
SELECT FROM lineshaft.task WHERE id = %(id)s::text
