-- What attempts report to have spent while they run. A ledger (the agent, the DAG, the day) counts the reservation of an attempt as long as
-- the attempt stays within it; what is above it is booked at once (lineshaft.booked_1). The end of the attempt settles the rest (effects.sql,
-- complete.sql).

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
        live.reserved_usd, live.agent_reserved, live.day_reserved
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
        SELECT agent_id, sum(lineshaft.booked_1(after, reserved_usd, agent_reserved) - lineshaft.booked_1(before, reserved_usd, agent_reserved)) AS actual
        FROM held GROUP BY agent_id ORDER BY agent_id
    ) AS share
    WHERE agent.id = share.agent_id AND share.actual > 0 AND (SELECT count(*) FROM raised) >= 0
    RETURNING agent.id
),
dags AS (
    UPDATE lineshaft.dag
    SET spent_usd = dag.spent_usd + share.actual
    FROM (
        SELECT dag_id, sum(lineshaft.booked_1(after, reserved_usd, true) - lineshaft.booked_1(before, reserved_usd, true)) AS actual
        FROM held WHERE dag_id IS NOT NULL GROUP BY dag_id ORDER BY dag_id
    ) AS share
    WHERE dag.id = share.dag_id AND share.actual > 0 AND (SELECT count(*) FROM agents) >= 0
    RETURNING dag.id
),
share AS MATERIALIZED (
    SELECT coalesce(sum(lineshaft.booked_1(after, reserved_usd, day_reserved) - lineshaft.booked_1(before, reserved_usd, day_reserved)), 0) AS actual
    FROM held WHERE (SELECT count(*) FROM dags) >= 0
),
day AS (
    -- include: spend_today
)
-- Whether an attempt has reported another thousandth of the velocity limit: within a reservation nothing is booked (velocity.sql).
SELECT coalesce(bool_or(floor(held.after / step.usd) > floor(held.before / step.usd)), false) AS passed_step
FROM held
CROSS JOIN (SELECT greatest(velocity_usd / 1000, 0.000001) AS usd FROM lineshaft.limits WHERE velocity_usd IS NOT NULL) AS step

-- name: limits_reached
-- After `spend`: the limits that these claims are over. Their agents give them up.
SELECT live.id, live.epoch,
    -- include: over_limit
    AS reason
FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch)
JOIN lineshaft.task_live AS live ON live.id = input.id
WHERE live.epoch = input.epoch AND live.status IN ('CLAIMED', 'RUNNING')

-- name: lock_spenders
-- Comes before spend_late, which must see what others have made of these tasks: one that has just ended has its cost in another table.
SELECT live.id FROM lineshaft.task_live AS live WHERE live.id = ANY (%(ids)s::text[]) ORDER BY live.id FOR NO KEY UPDATE

-- name: lock_ended_spenders
-- For the same reason: one that has ended has corrections in another table. After lock_spenders, because a task may end in the meantime.
SELECT ended.id FROM lineshaft.task_end AS ended WHERE ended.id = ANY (%(ids)s::text[]) ORDER BY ended.id FOR NO KEY UPDATE

-- name: spend_late
-- What claims that have ended, or whose output is being checked, report to have spent beyond what they had reported before: the money is
-- gone, so it is booked, once. The claim that completed a task has no row of its own unless a gate checked its output: it had spent what neither
-- the earlier attempts have nor people have corrected.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
input AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[])
        AS input (id, epoch, cost, tokens_in, tokens_out)
),
completed AS MATERIALIZED (
    SELECT ended.id, ended.epoch, ended.agent_id, ended.cost_usd, ended.tokens_input, ended.tokens_output
    FROM lineshaft.task_end AS ended
    WHERE ended.id = ANY (%(ids)s::text[]) AND ended.status = 'COMPLETED'
      AND NOT EXISTS (SELECT FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch = ended.epoch)
    ORDER BY ended.id
    FOR NO KEY UPDATE
),
recorded AS MATERIALIZED (
    SELECT attempt.task_id, attempt.epoch, attempt.agent_id, attempt.cost_usd - attempt.gate_cost_usd AS cost_usd, attempt.tokens_input,
        attempt.tokens_output
    FROM input
    JOIN lineshaft.attempt ON attempt.task_id = input.id AND attempt.epoch = input.epoch
    WHERE (SELECT count(*) FROM completed) >= 0
    ORDER BY attempt.task_id, attempt.epoch
    FOR NO KEY UPDATE OF attempt
),
known AS MATERIALIZED (
    SELECT before.task_id, before.epoch, before.agent_id, greatest(input.cost - before.cost_usd, 0) AS cost,
        greatest(input.tokens_in - before.tokens_input, 0) AS tokens_in, greatest(input.tokens_out - before.tokens_output, 0) AS tokens_out
    FROM input
    JOIN (
        SELECT * FROM recorded
        UNION ALL
        SELECT completed.id, completed.epoch, completed.agent_id, completed.cost_usd - lineshaft.corrected_1(completed.id) - earlier.cost_usd,
            completed.tokens_input - earlier.tokens_input, completed.tokens_output - earlier.tokens_output
        FROM completed
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(cost_usd), 0) AS cost_usd, coalesce(sum(tokens_input), 0) AS tokens_input,
                coalesce(sum(tokens_output), 0) AS tokens_output
            FROM lineshaft.attempt WHERE attempt.task_id = completed.id
        ) AS earlier
    ) AS before ON before.task_id = input.id AND before.epoch = input.epoch
    WHERE input.cost > before.cost_usd OR input.tokens_in > before.tokens_input OR input.tokens_out > before.tokens_output
),
attempts AS (
    UPDATE lineshaft.attempt
    SET cost_usd = attempt.cost_usd + known.cost, tokens_input = attempt.tokens_input + known.tokens_in,
        tokens_output = attempt.tokens_output + known.tokens_out
    FROM known
    WHERE attempt.task_id = known.task_id AND attempt.epoch = known.epoch
),
-- One heartbeat may report two lost claims of a task.
by_task AS MATERIALIZED (
    SELECT task_id, sum(cost) AS cost, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out FROM known GROUP BY task_id
),
lives AS (
    UPDATE lineshaft.task_live AS live
    SET cost_usd = live.cost_usd + by_task.cost, tokens_input = live.tokens_input + by_task.tokens_in,
        tokens_output = live.tokens_output + by_task.tokens_out
    FROM by_task
    WHERE live.id = by_task.task_id
    RETURNING live.id
),
ends AS (
    UPDATE lineshaft.task_end AS ended
    SET cost_usd = ended.cost_usd + by_task.cost, tokens_input = ended.tokens_input + by_task.tokens_in,
        tokens_output = ended.tokens_output + by_task.tokens_out
    FROM by_task
    WHERE ended.id = by_task.task_id AND (SELECT count(*) FROM lives) >= 0
    RETURNING ended.id, ended.epoch, ended.status, by_task.cost
),
letters AS (
    UPDATE lineshaft.dead_letter
    SET total_cost_usd = dead_letter.total_cost_usd + ends.cost
    FROM ends
    WHERE ends.status = 'DEAD_LETTERED' AND dead_letter.task_id = ends.id AND dead_letter.epoch = ends.epoch
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
        SELECT task.dag_id, sum(by_task.cost) AS actual
        FROM by_task JOIN lineshaft.task ON task.id = by_task.task_id GROUP BY task.dag_id ORDER BY 1
    ) AS paid
    WHERE dag.id = paid.dag_id AND paid.actual > 0 AND (SELECT count(*) FROM agents) >= 0
    RETURNING dag.id
),
share AS MATERIALIZED (SELECT coalesce(sum(cost), 0) AS actual FROM known WHERE (SELECT count(*) FROM dags) >= 0),
day AS (
    -- include: spend_today
)
SELECT count(*) FROM known
