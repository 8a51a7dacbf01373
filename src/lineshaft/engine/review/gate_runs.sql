-- Runs of gates that cost money (gate_runs.py). Rows are locked in the order of all transitions: the day's advisory lock, tasks, agents, DAGs,
-- the day.

-- name: lock_day
-- include: lock_day

-- name: due_runs
-- Outputs that wait for one of these gates and that no validator has, with what is left of their totals. Locked, skipping those that others
-- have. They are found first, by attempt_gated, whatever the planner thinks; what decides is read again from the locked rows.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
due AS MATERIALIZED (
    SELECT attempt.task_id, attempt.epoch
    FROM lineshaft.attempt
    WHERE attempt.outcome = 'validating' AND attempt.gate IS NOT NULL AND attempt.gate = ANY (%(methods)s::text[])
      AND attempt.gate_due_at <= (SELECT now FROM clock)
    ORDER BY attempt.gate_due_at
    LIMIT %(limit)s::integer
)
SELECT attempt.task_id AS id, attempt.epoch, attempt.gate, attempt.gate_blocked_by AS blocked_by, attempt.agent_id, live.dag_id, task.type,
    task.max_total_cost_usd - live.cost_usd AS left_usd
FROM due
JOIN lineshaft.attempt ON attempt.task_id = due.task_id AND attempt.epoch = due.epoch
JOIN lineshaft.task_live AS live ON live.id = attempt.task_id AND live.epoch = attempt.epoch
JOIN lineshaft.task ON task.id = attempt.task_id
WHERE attempt.outcome = 'validating' AND attempt.gate = ANY (%(methods)s::text[]) AND attempt.gate_due_at <= (SELECT now FROM clock)
  -- What an earlier run has cost is booked first.
  AND NOT EXISTS (SELECT FROM lineshaft.gate_run WHERE gate_run.task_id = attempt.task_id AND gate_run.epoch = attempt.epoch)
ORDER BY attempt.gate_due_at
FOR NO KEY UPDATE OF live, attempt SKIP LOCKED

-- name: lock_agents
-- Those that have a budget, with what is left of it.
SELECT id, budget_usd - spent_usd - reserved_usd AS money
FROM lineshaft.agent WHERE id = ANY (%(ids)s::text[]) AND budget_usd IS NOT NULL
ORDER BY id FOR NO KEY UPDATE

-- name: lock_dags
-- money: what is left; NULL: no limit.
SELECT id, budget_ceiling_usd - spent_usd - reserved_usd AS money
FROM lineshaft.dag WHERE id = ANY (%(ids)s::text[])
ORDER BY id FOR NO KEY UPDATE

-- name: installation
-- What a run reserves and what it needs, what is left of the day (NULL: no limit), and the types whose spending is stopped.
SELECT limits.judge_max_cost_usd AS reserved_usd, lineshaft.needed_1(NULL, limits.judge_max_cost_usd) AS needed_usd,
    limits.daily_budget_usd - limits.reserved_usd - coalesce(spend.spent_usd, 0) AS money,
    ARRAY(SELECT type FROM lineshaft.pause WHERE pause.stops) AS stopped
FROM lineshaft.limits
LEFT JOIN lineshaft.spend ON spend.day = (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date

-- name: begin_runs
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
taken AS (
    UPDATE lineshaft.attempt
    SET gate_due_at = clock.now + make_interval(secs => %(lease)s::double precision), gate_runs = attempt.gate_runs + 1, gate_blocked_by = NULL
    FROM clock, unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch)
    WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch
    RETURNING attempt.task_id, attempt.epoch, attempt.gate_no, attempt.gate, attempt.gate_runs, attempt.output, attempt.agent_id, attempt.gate_due_at
),
begun AS (
    INSERT INTO lineshaft.gate_run (until, epoch, run, gate_no, agent_reserved, day_reserved, task_id, agent_id, reserved_usd)
    SELECT taken.gate_due_at, taken.epoch, taken.gate_runs, taken.gate_no, coalesce(taken.agent_id = ANY (%(limited)s::text[]), false),
        %(of_day)s::boolean, taken.task_id, taken.agent_id, %(reserved)s::numeric
    FROM taken
)
SELECT taken.task_id AS id, taken.epoch, taken.gate_no, taken.gate, taken.gate_runs, task.type, task.title, task.spec, task.gates,
    task.require_decision_report, taken.output, true AS is_paid
FROM taken JOIN lineshaft.task ON task.id = taken.task_id

-- name: reserve_of_agents
UPDATE lineshaft.agent SET reserved_usd = agent.reserved_usd + share.n * %(reserved)s::numeric
FROM (SELECT id, count(*) AS n FROM unnest(%(ids)s::text[]) AS paying (id) GROUP BY id) AS share
WHERE agent.id = share.id

-- name: reserve_of_dags
UPDATE lineshaft.dag SET reserved_usd = dag.reserved_usd + share.n * %(reserved)s::numeric
FROM (SELECT id, count(*) AS n FROM unnest(%(ids)s::text[]) AS paying (id) GROUP BY id) AS share
WHERE dag.id = share.id

-- name: reserve_of_day
UPDATE lineshaft.limits SET reserved_usd = limits.reserved_usd + %(usd)s::numeric

-- name: block_runs
UPDATE lineshaft.attempt
SET gate_due_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(pause)s::double precision), gate_blocked_by = input.reason
FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(reasons)s::text[]) AS input (id, epoch, reason)
WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch

-- name: renew_runs
UPDATE lineshaft.gate_run
SET until = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(lease)s::double precision)
FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(gate_nos)s::smallint[], %(runs)s::integer[]) AS mine (id, epoch, gate_no, run)
WHERE gate_run.task_id = mine.id AND gate_run.epoch = mine.epoch AND gate_run.gate_no = mine.gate_no AND gate_run.run = mine.run

-- name: lost_runs
-- Their validators have ended. By gate_run_lost.
SELECT task_id AS id, epoch, gate_no, run FROM lineshaft.gate_run WHERE until <= coalesce(%(now)s::timestamptz, now()) ORDER BY until LIMIT %(limit)s::integer

-- name: end_runs
-- Under the locks of their tasks. Of two calls for one run, the second finds nothing.
DELETE FROM lineshaft.gate_run
USING unnest(%(ids)s::text[], %(epochs)s::integer[], %(gate_nos)s::smallint[], %(runs)s::integer[]) AS mine (id, epoch, gate_no, run)
WHERE gate_run.task_id = mine.id AND gate_run.epoch = mine.epoch AND gate_run.gate_no = mine.gate_no AND gate_run.run = mine.run
  AND (NOT %(only_lost)s::boolean OR gate_run.until <= coalesce(%(now)s::timestamptz, now()))
RETURNING gate_run.task_id, gate_run.epoch, gate_run.agent_id, gate_run.reserved_usd, gate_run.agent_reserved, gate_run.day_reserved,
    (SELECT dag.id FROM lineshaft.task JOIN lineshaft.dag ON dag.id = task.dag_id WHERE task.id = gate_run.task_id) AS dag_id

-- name: dispute
-- Records what runs have cost beyond their ceilings. It joins what the claim itself has reported beyond its own: a person decides on both.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
beyond AS MATERIALIZED (
    SELECT input.id, input.epoch, input.usd, input.ceiling, attempt.agent_id, lineshaft.cost_ceiling_1(task.max_cost_usd, limits.default_max_cost_usd) AS of_claim,
        (SELECT dag.id FROM lineshaft.dag WHERE dag.id = task.dag_id) AS dag_id, attempt.gate
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(amounts)s::numeric[], %(ceilings)s::numeric[]) AS input (id, epoch, usd, ceiling)
    JOIN lineshaft.task ON task.id = input.id
    JOIN lineshaft.attempt ON attempt.task_id = input.id AND attempt.epoch = input.epoch
    CROSS JOIN lineshaft.limits
    WHERE attempt.agent_id IS NOT NULL
),
disputed AS (
    INSERT INTO lineshaft.cost_dispute AS known (at, task_id, epoch, agent_id, reported_usd, ceiling_usd)
    SELECT clock.now, id, epoch, agent_id, of_claim + usd, of_claim FROM beyond CROSS JOIN clock ORDER BY id, epoch
    ON CONFLICT (task_id, epoch) DO UPDATE SET reported_usd = known.reported_usd + excluded.reported_usd - excluded.ceiling_usd
)
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
SELECT clock.now, '{alert}', id, dag_id, agent_id, epoch, jsonb_build_object(
    'key', 'disputed_cost', 'gate', gate, 'disputed_usd', usd, 'reported_usd', usd + ceiling, 'ceiling_usd', ceiling,
    'message', concat(
        'Task ', id, ': gate ', gate, ' reports a cost of ', trim_scale(usd + ceiling), ' USD for the output of claim ', epoch, '. Only ',
        trim_scale(ceiling), ' USD of it count until a person decides: lineshaft costs accept, refuse or correct'
    )
)
FROM beyond CROSS JOIN clock

-- name: charge
-- What gates have cost, on the attempts and on their tasks, which may have ended since.
WITH input AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(costs)s::numeric[]) AS input (id, epoch, cost) WHERE input.cost > 0
),
attempts AS (
    UPDATE lineshaft.attempt SET cost_usd = attempt.cost_usd + input.cost, gate_cost_usd = attempt.gate_cost_usd + input.cost
    FROM input WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch
),
lives AS (
    UPDATE lineshaft.task_live AS live SET cost_usd = live.cost_usd + input.cost FROM input WHERE live.id = input.id
),
ends AS (
    UPDATE lineshaft.task_end AS ended SET cost_usd = ended.cost_usd + input.cost FROM input WHERE ended.id = input.id
    RETURNING ended.id, ended.epoch, input.cost
)
UPDATE lineshaft.dead_letter SET total_cost_usd = dead_letter.total_cost_usd + ends.cost
FROM ends WHERE dead_letter.task_id = ends.id AND dead_letter.epoch = ends.epoch
