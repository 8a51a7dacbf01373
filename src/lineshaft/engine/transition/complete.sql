-- A row moves only if its status and epoch are as expected; a task that didn't move is missing from the result.

-- name: complete_tasks
-- RUNNING → COMPLETED for tasks without gates, and VALIDATING → COMPLETED for accepted outputs. unblock_dependents moves the dependents,
-- in the same transaction but under a newer snapshot: an edge that was added while this statement waited for a row must not be missed.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
input AS MATERIALIZED (
    SELECT *
    FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(outputs)s::jsonb[], %(artifacts)s::jsonb[], %(reports)s::jsonb[],
        %(output_types)s::text[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[]
    ) AS input (id, epoch, output, artifacts, report, output_type, cost, tokens_in, tokens_out)
),
gone AS (
    DELETE FROM lineshaft.task_live AS live
    USING input
    WHERE live.id = input.id
      AND live.epoch = input.epoch
      -- Out of VALIDATING only once the gates have accepted the output: completing again doesn't bypass them.
      AND CASE WHEN %(accepted)s::boolean THEN live.status = 'VALIDATING' ELSE live.status = 'RUNNING' AND NOT live.is_gated END
      -- Somebody took its document lock away; lock_kept below checks again.
      AND (
        live.lock_token IS NULL OR live.status = 'VALIDATING'
        OR
        -- include: has_locks
      )
      -- A DAG that was created while this statement waited for the task can't be counted here: the caller tries again.
      AND (live.dag_id IS NULL OR (SELECT true FROM lineshaft.dag WHERE dag.id = live.dag_id))
      -- An attempt that cost more than the task's limits is not accepted. Of an accepted output this was checked when it was handed in; the
      -- attempt isn't to blame for what its gates have cost since then.
      AND (%(accepted)s::boolean OR lineshaft.within_limit_1(
        greatest(input.cost, live.attempt_cost_usd),
        lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd)
      ))
    RETURNING live.id, live.epoch, live.dag_id, live.status, live.lane_id, live.lock_key, live.admission, live.lock_owner, live.lock_token, live.has_slots, live.ready_at, live.claimed_at, live.started_at,
        live.first_started_at, live.attempts, live.revivals, live.agent_id, live.incarnation, live.model, live.version, live.account, live.cost_usd,
        live.tokens_input, live.tokens_output, live.reserved_usd, live.agent_reserved, live.day_reserved, live.attempt_cost_usd,
        input.output, input.artifacts, input.report, input.output_type, greatest(input.cost, live.attempt_cost_usd) AS actual,
        greatest(input.tokens_in, live.attempt_tokens_input) AS tokens_in, greatest(input.tokens_out, live.attempt_tokens_output) AS tokens_out
),
ended AS (
    -- include: insert_completed
),
freed AS (
    UPDATE lineshaft.instance
    SET
        -- include: free_slots
    FROM clock, (
        SELECT agent_id, incarnation, count(*) AS n FROM gone WHERE agent_id IS NOT NULL GROUP BY agent_id, incarnation ORDER BY 1, 2
    ) AS share
    WHERE instance.agent_id = share.agent_id AND instance.incarnation = share.incarnation
    RETURNING instance.agent_id
),
settled AS (
    -- include: settle_agents
    AND (SELECT count(*) FROM freed) >= 0
    RETURNING agent.id
),
-- The counts enforce the order: instances, agents, locks, DAGs, the day, the same as in claims.
lock_released AS (
    DELETE FROM lineshaft.lock
    USING gone
    WHERE lock.key = gone.lock_key AND lock.holder_task_id = gone.id AND gone.lock_key IS NOT NULL AND (SELECT count(*) FROM settled) >= 0
      AND (SELECT bool_or(admission ? 'locks') FROM gone) IS NOT TRUE
    RETURNING lock.key, lock.token
),
-- The lock that a batch holds for its child.
lock_kept AS MATERIALIZED (
    SELECT lock.key, lock.token
    FROM lineshaft.lock JOIN gone ON lock.key = gone.lock_key AND lock.token = gone.lock_token
    WHERE gone.lock_owner IS NOT NULL AND (SELECT count(*) FROM settled) >= 0
      AND (SELECT bool_or(admission ? 'locks') FROM gone) IS NOT TRUE
    ORDER BY lock.key
    FOR NO KEY UPDATE OF lock
),
-- If one of the tasks has several locks, or shares one, a function does both for all tasks.
released_together AS MATERIALIZED (
    SELECT released.*
    FROM (
        SELECT array_agg(needed.key) AS keys, array_agg(gone.id) AS holders, array_agg(gone.lock_token) AS tokens
        FROM gone CROSS JOIN LATERAL unnest(lineshaft.lock_keys_1(gone.lock_key, gone.admission)) AS needed (key)
        WHERE gone.lock_key IS NOT NULL
        HAVING bool_or(gone.admission ? 'locks') AND (SELECT count(*) FROM settled) >= 0
    ) AS held
    CROSS JOIN LATERAL lineshaft.release_locks_1(held.keys, held.holders, held.tokens, NULL) AS released
),
dag_moved AS (
    UPDATE lineshaft.dag
    SET completed = dag.completed + share.n,
        reserved_usd = dag.reserved_usd - share.reserved,
        spent_usd = dag.spent_usd + share.actual,
        status = CASE
            WHEN dag.completed + share.n + dag.cancelled = dag.total THEN 'completed' ELSE dag.status
        END::lineshaft.dag_status,
        ended_at = CASE WHEN dag.completed + share.n + dag.cancelled = dag.total THEN clock.now ELSE dag.ended_at END
    FROM (
        -- A gate that ran elsewhere returned the money and booked the cost when it began: of such a task both are 0 here.
        SELECT dag_id, count(*) AS n,
            -- include: dag_money
        FROM gone WHERE dag_id IS NOT NULL GROUP BY dag_id ORDER BY dag_id
    ) AS share, clock
    WHERE dag.id = share.dag_id
      AND (SELECT count(*) FROM lock_released) + (SELECT count(*) FROM lock_kept) + (SELECT count(*) FROM released_together) >= 0
    RETURNING dag.id, dag.status, dag.dead_lettered, dag.cancelled, share.reserved
),
share AS MATERIALIZED (
    -- include: day_money
    WHERE (SELECT count(*) FROM dag_moved) >= 0
),
day_freed AS (
    -- include: free_day
),
day_spent AS (
    -- include: spend_today
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
    SELECT clock.now,
        CASE WHEN gone.status = 'RUNNING' THEN '{task.validating,task.completed}' ELSE '{task.completed}' END::text[],
        gone.id, gone.dag_id, gone.agent_id, gone.epoch
    FROM gone CROSS JOIN clock
    RETURNING seq
),
-- The cause first: the count enforces the order.
dag_logged AS (
    INSERT INTO lineshaft.event (at, kinds, dag_id)
    SELECT clock.now, '{dag.completed}', dag_moved.id FROM dag_moved CROSS JOIN clock
    WHERE dag_moved.status = 'completed' AND (SELECT count(*) FROM logged) >= 0
),
troubled AS MATERIALIZED (SELECT key, state, probe_task_id FROM lineshaft.breaker WHERE state <> 'closed' OR failures > 0)
SELECT
    gone.id, gone.dag_id,
    -- For the caller: a DAG with a dead letter, a cancelled task or freed money, and locks that others wait for.
    gone.dag_id IN (SELECT id FROM dag_moved WHERE dead_lettered + cancelled > 0 OR reserved > 0) AS dag_needs_care,
    gone.lock_key IN (SELECT key FROM lock_released) AS lock_released,
    -- The lock was taken away after this statement had begun.
    gone.status = 'RUNNING' AND gone.lock_token IS NOT NULL AND CASE
        WHEN gone.admission ? 'locks' THEN (
            SELECT count(*) FROM released_together WHERE token = gone.lock_token
        ) < cardinality(lineshaft.lock_keys_1(gone.lock_key, gone.admission))
        ELSE gone.lock_token NOT IN (
            SELECT token FROM lock_released UNION ALL SELECT token FROM lock_kept UNION ALL SELECT token FROM released_together
        )
    END AS lock_lost,
    gone.lock_key, gone.has_slots,
    CASE WHEN gone.lock_key IS NOT NULL THEN ARRAY(
        SELECT key FROM released_together WHERE is_gone AND holder_task_id = gone.id
    ) END AS released_together,
    -- Breakers that have failures to forget, or have this task as their probe; NULL while all breakers are closed.
    CASE
        WHEN EXISTS (SELECT FROM troubled) THEN ARRAY(
            SELECT troubled.key
            FROM troubled
            WHERE (troubled.state = 'closed' OR troubled.probe_task_id = gone.id)
              AND troubled.key IN (
                (SELECT lane.type FROM lineshaft.lane WHERE lane.id = gone.lane_id), 'model:' || gone.model, 'account:' || gone.account
              )
        )
    END AS breakers
FROM gone

-- name: begin_validation
-- RUNNING → VALIDATING: the output is stored with the attempt. The agent holds the task until a gate runs elsewhere (gates.sql). Follows
-- `spend`, so that the row has what the attempt cost.
WITH kept AS (
    INSERT INTO lineshaft.attempt (
        task_id, epoch, number, revival, agent_id, incarnation, instance, model, version, account, claimed_at, started_at, outcome, cost_usd,
        tokens_input, tokens_output, output
    )
    SELECT live.id, live.epoch, live.attempts + 1, live.revivals, live.agent_id, live.incarnation,
        (SELECT name FROM lineshaft.instance WHERE agent_id = live.agent_id AND incarnation = live.incarnation),
        live.model, live.version, live.account, live.claimed_at, live.started_at, 'validating', live.attempt_cost_usd, live.attempt_tokens_input,
        live.attempt_tokens_output, input.output
    FROM lineshaft.task_live AS live
    JOIN unnest(%(ids)s::text[], %(outputs)s::jsonb[]) AS input (id, output) ON input.id = live.id
    RETURNING task_id, tokens_input, tokens_output
)
UPDATE lineshaft.task_live AS live
SET status = 'VALIDATING', tokens_input = live.tokens_input + kept.tokens_input, tokens_output = live.tokens_output + kept.tokens_output,
    attempt_tokens_input = 0, attempt_tokens_output = 0
FROM kept
WHERE live.id = kept.task_id

-- name: complete_fast
-- RUNNING → COMPLETED where nothing else moves: no DAG, no lock, no dependents, no gate, no breaker with failures to forget. One statement
-- is enough: adding a dependent marks the row of such a task (lock_upstream).
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
gone AS (
    DELETE FROM lineshaft.task_live AS live
    USING unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(outputs)s::jsonb[], %(artifacts)s::jsonb[], %(reports)s::jsonb[],
        %(output_types)s::text[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[]
    ) AS input (id, epoch, output, artifacts, report, output_type, cost, tokens_in, tokens_out)
    WHERE live.id = input.id
      AND live.epoch = input.epoch
      AND live.status = 'RUNNING' AND NOT live.is_gated AND NOT live.awaited AND live.dag_id IS NULL AND live.lock_key IS NULL
      AND NOT live.has_slots AND live.account IS NULL
      AND lineshaft.within_limit_1(
        greatest(input.cost, live.attempt_cost_usd),
        lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd)
      )
      AND NOT EXISTS (SELECT FROM lineshaft.breaker WHERE state <> 'closed' OR failures > 0)
    RETURNING live.id, live.epoch, live.ready_at, live.claimed_at, live.started_at, live.first_started_at, live.attempts,
        live.revivals, live.agent_id, live.incarnation, live.model, live.version, live.account, live.cost_usd, live.tokens_input, live.tokens_output,
        live.reserved_usd, live.agent_reserved, live.day_reserved, live.attempt_cost_usd,
        input.output, input.artifacts, input.report, input.output_type, greatest(input.cost, live.attempt_cost_usd) AS actual,
        greatest(input.tokens_in, live.attempt_tokens_input) AS tokens_in, greatest(input.tokens_out, live.attempt_tokens_output) AS tokens_out
),
ended AS (
    -- include: insert_completed
),
freed AS (
    UPDATE lineshaft.instance
    SET
        -- include: free_slots
    FROM clock, (
        SELECT agent_id, incarnation, count(*) AS n FROM gone WHERE agent_id IS NOT NULL GROUP BY agent_id, incarnation ORDER BY 1, 2
    ) AS share
    WHERE instance.agent_id = share.agent_id AND instance.incarnation = share.incarnation
    RETURNING instance.agent_id
),
settled AS (
    -- include: settle_agents
    AND (SELECT count(*) FROM freed) >= 0
    RETURNING agent.id
),
share AS MATERIALIZED (
    -- include: day_money
    WHERE (SELECT count(*) FROM settled) >= 0
),
day_freed AS (
    -- include: free_day
),
day_spent AS (
    -- include: spend_today
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, epoch)
    SELECT clock.now, '{task.validating,task.completed}', gone.id, gone.agent_id, gone.epoch
    FROM gone CROSS JOIN clock
)
SELECT id FROM gone

-- name: answered_before
-- Claims that recorded an output which is still being checked, or was rejected, with the status of their tasks, or which completed a task
-- that has been rerun since: the result of a repeated call.
SELECT attempt.task_id, CASE WHEN attempt.outcome = 'completed' THEN 'COMPLETED' ELSE coalesce(live.status, ended.status)::text END AS status
FROM lineshaft.attempt
JOIN unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch) ON attempt.task_id = input.id AND attempt.epoch = input.epoch
LEFT JOIN lineshaft.task_live AS live ON live.id = attempt.task_id AND live.epoch = attempt.epoch
LEFT JOIN lineshaft.task_end AS ended ON ended.id = attempt.task_id AND ended.epoch = attempt.epoch
WHERE attempt.outcome = 'completed' OR attempt.output IS NOT NULL AND CASE coalesce(live.status, ended.status)
    WHEN 'VALIDATING' THEN attempt.outcome = 'validating'
    WHEN 'RETRYING' THEN attempt.outcome = 'failed' AND attempt.category = 'invalid_output'
    WHEN 'READY' THEN attempt.outcome = 'failed' AND attempt.category = 'invalid_output'
    WHEN 'DEAD_LETTERED' THEN attempt.outcome = 'failed' AND attempt.category = 'invalid_output'
    ELSE false
  END
