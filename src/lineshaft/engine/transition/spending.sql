-- What attempts report to have spent while they run. A ledger (the agent, the DAG, the day) counts the reservation of an attempt as long as
-- the attempt stays within it; what is above it is booked at once. So an attempt has booked greatest(attempt_cost_usd - reservation, 0) in each,
-- and its end settles the rest (changes.sql, complete.sql).

-- name: limit_spending_wait
-- A report waits for locked rows no longer than this: it is sent again.
SELECT set_config('lock_timeout', '1s', true)

-- name: spend
-- Raises what attempts have cost so far, and their tokens; both only grow. Books what is above reservations at once. Rows are locked in the
-- order of all transitions: tasks by id, agents, DAGs, the day.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
held AS MATERIALIZED (
    SELECT live.id, live.agent_id, live.dag_id, live.attempt_cost_usd AS before,
        greatest(live.attempt_cost_usd, input.cost) AS after,
        greatest(live.attempt_tokens_input, input.tokens_in) AS tokens_in, greatest(live.attempt_tokens_output, input.tokens_out) AS tokens_out,
        live.reserved_usd AS of_dag,
        CASE WHEN live.agent_reserved THEN live.reserved_usd ELSE 0 END AS of_agent,
        CASE WHEN live.day_reserved THEN live.reserved_usd ELSE 0 END AS of_day
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[])
        AS input (id, epoch, cost, tokens_in, tokens_out)
    JOIN lineshaft.task_live AS live ON live.id = input.id
    WHERE live.epoch = input.epoch AND live.status IN ('CLAIMED', 'RUNNING')
      AND (
        input.cost > live.attempt_cost_usd OR input.tokens_in > live.attempt_tokens_input OR input.tokens_out > live.attempt_tokens_output
      )
    ORDER BY live.id
    FOR NO KEY UPDATE OF live
),
raised AS (
    UPDATE lineshaft.task_live AS live
    SET attempt_cost_usd = held.after, attempt_tokens_input = held.tokens_in, attempt_tokens_output = held.tokens_out
    FROM held
    WHERE live.id = held.id
    RETURNING live.id
),
agents AS (
    UPDATE lineshaft.agent
    SET spent_usd = agent.spent_usd + share.actual
    FROM (
        SELECT agent_id, sum(greatest(after - of_agent, 0) - greatest(before - of_agent, 0)) AS actual
        FROM held GROUP BY agent_id ORDER BY agent_id
    ) AS share
    WHERE agent.id = share.agent_id AND share.actual > 0 AND (SELECT count(*) FROM raised) >= 0
    RETURNING agent.id
),
dags AS (
    UPDATE lineshaft.dag
    SET spent_usd = dag.spent_usd + share.actual
    FROM (
        SELECT dag_id, sum(greatest(after - of_dag, 0) - greatest(before - of_dag, 0)) AS actual
        FROM held WHERE dag_id IS NOT NULL GROUP BY dag_id ORDER BY dag_id
    ) AS share
    WHERE dag.id = share.dag_id AND share.actual > 0 AND (SELECT count(*) FROM agents) >= 0
    RETURNING dag.id
),
share AS MATERIALIZED (
    SELECT coalesce(sum(greatest(after - of_day, 0) - greatest(before - of_day, 0)), 0) AS actual
    FROM held WHERE (SELECT count(*) FROM dags) >= 0
),
day AS (
    -- include: spend_today
)
SELECT count(*) FROM raised

-- name: limits_reached
-- After `spend`: the limits that these claims are over. Their agents give them up.
SELECT live.id, live.epoch,
    -- include: over_limit
    AS reason
FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch)
JOIN lineshaft.task_live AS live ON live.id = input.id
WHERE live.epoch = input.epoch AND live.status IN ('CLAIMED', 'RUNNING')

-- name: spend_late
-- What claims that have ended report to have spent beyond what they had reported before: the money is gone, so it is booked, once.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
-- Tasks before everything else, as in all transitions.
tasks AS MATERIALIZED (
    SELECT live.id FROM lineshaft.task_live AS live WHERE live.id = ANY (%(ids)s::text[]) ORDER BY live.id FOR NO KEY UPDATE
),
known AS MATERIALIZED (
    SELECT attempt.task_id, attempt.epoch, attempt.agent_id, greatest(input.cost - attempt.cost_usd, 0) AS cost,
        greatest(input.tokens_in - attempt.tokens_input, 0) AS tokens_in, greatest(input.tokens_out - attempt.tokens_output, 0) AS tokens_out
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[])
        AS input (id, epoch, cost, tokens_in, tokens_out)
    JOIN lineshaft.attempt ON attempt.task_id = input.id AND attempt.epoch = input.epoch
    WHERE attempt.outcome <> 'validating' AND (SELECT count(*) FROM tasks) >= 0
      AND (input.cost > attempt.cost_usd OR input.tokens_in > attempt.tokens_input OR input.tokens_out > attempt.tokens_output)
    ORDER BY attempt.task_id
    FOR UPDATE OF attempt
),
attempts AS (
    UPDATE lineshaft.attempt
    SET cost_usd = attempt.cost_usd + known.cost, tokens_input = attempt.tokens_input + known.tokens_in,
        tokens_output = attempt.tokens_output + known.tokens_out
    FROM known
    WHERE attempt.task_id = known.task_id AND attempt.epoch = known.epoch
),
lives AS (
    UPDATE lineshaft.task_live AS live
    SET cost_usd = live.cost_usd + known.cost, tokens_input = live.tokens_input + known.tokens_in,
        tokens_output = live.tokens_output + known.tokens_out
    FROM known
    WHERE live.id = known.task_id
    RETURNING live.id
),
ends AS (
    UPDATE lineshaft.task_end AS ended
    SET cost_usd = ended.cost_usd + known.cost, tokens_input = ended.tokens_input + known.tokens_in,
        tokens_output = ended.tokens_output + known.tokens_out
    FROM known
    WHERE ended.id = known.task_id AND (SELECT count(*) FROM lives) >= 0
    RETURNING ended.id
),
agents AS (
    UPDATE lineshaft.agent
    SET spent_usd = agent.spent_usd + paid.actual
    FROM (SELECT agent_id, sum(cost) AS actual FROM known WHERE agent_id IS NOT NULL GROUP BY agent_id ORDER BY agent_id) AS paid
    WHERE agent.id = paid.agent_id AND paid.actual > 0 AND (SELECT count(*) FROM ends) >= 0
    RETURNING agent.id
),
dags AS (
    UPDATE lineshaft.dag
    SET spent_usd = dag.spent_usd + paid.actual
    FROM (
        SELECT task.dag_id, sum(known.cost) AS actual FROM known JOIN lineshaft.task ON task.id = known.task_id GROUP BY task.dag_id ORDER BY 1
    ) AS paid
    WHERE dag.id = paid.dag_id AND paid.actual > 0 AND (SELECT count(*) FROM agents) >= 0
    RETURNING dag.id
),
share AS MATERIALIZED (SELECT coalesce(sum(cost), 0) AS actual FROM known WHERE (SELECT count(*) FROM dags) >= 0),
day AS (
    -- include: spend_today
)
SELECT count(*) FROM known
