-- Outputs on their way through the gates. Used by store/gates.py.
--
-- The attempt's row has it all: the output, the gate it has come to, and what the gates before said. While its agent still holds the task
-- `gate` is NULL; once it waits for a gate that runs elsewhere nobody holds anything, and `gate` is that gate's method.

-- name: read_handed_in
-- Outputs that are being validated, with what the checks need to know.
SELECT live.id, live.epoch, attempt.gate_no, attempt.gate, task.type, task.title, task.spec, task.gates, task.require_decision_report,
    attempt.output
FROM lineshaft.task_live AS live
JOIN lineshaft.attempt ON attempt.task_id = live.id AND attempt.epoch = live.epoch
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = ANY (%(ids)s::text[]) AND live.status = 'VALIDATING' AND attempt.outcome = 'validating'

-- name: take_gates
-- For a validator: outputs that wait for a gate which it can run, and nobody else is running. It has them until `lease` is over, or longer
-- if it says so (renew_gates). Each is locked alone, and for this statement only. By attempt_gated.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
due AS MATERIALIZED (
    SELECT attempt.task_id, attempt.epoch
    FROM lineshaft.attempt
    WHERE attempt.outcome = 'validating' AND attempt.gate IS NOT NULL AND attempt.gate = ANY (%(methods)s::text[])
      AND attempt.gate_due_at <= (SELECT now FROM clock)
    ORDER BY attempt.gate_due_at
    LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
),
taken AS (
    UPDATE lineshaft.attempt
    SET gate_due_at = clock.now + make_interval(secs => %(lease)s::double precision), gate_runs = attempt.gate_runs + 1
    FROM due, clock
    WHERE attempt.task_id = due.task_id AND attempt.epoch = due.epoch
    RETURNING attempt.task_id, attempt.epoch, attempt.gate_no, attempt.gate, attempt.gate_runs, attempt.output
)
SELECT taken.task_id AS id, taken.epoch, taken.gate_no, taken.gate, taken.gate_runs, task.type, task.title, task.spec, task.gates,
    task.require_decision_report, taken.output
FROM taken JOIN lineshaft.task ON task.id = taken.task_id

-- name: renew_gates
-- The validators that have these are alive. What is missing from the answer is theirs no more.
UPDATE lineshaft.attempt
SET gate_due_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(lease)s::double precision)
FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(gate_nos)s::smallint[], %(runs)s::integer[]) AS mine (id, epoch, gate_no, runs)
WHERE attempt.task_id = mine.id AND attempt.epoch = mine.epoch AND attempt.gate_no = mine.gate_no AND attempt.gate_runs = mine.runs
  AND attempt.outcome = 'validating'
RETURNING attempt.task_id

-- name: postpone_gate
-- No verdict: it is tried again later. What it cost all the same is booked by whoever calls.
UPDATE lineshaft.attempt
SET gate_due_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(delay)s::double precision),
    gate_error = %(error)s::text, cost_usd = attempt.cost_usd + %(cost)s::numeric
WHERE task_id = %(id)s::text AND epoch = %(epoch)s::integer AND gate_no = %(gate_no)s::smallint AND gate_runs = %(runs)s::integer
  AND outcome = 'validating'
RETURNING task_id

-- name: lock_attempts
-- Under the locks of their tasks: how far they have come, and whose they are.
SELECT task_id, epoch, gate_no, gate, agent_id, output
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome = 'validating'
ORDER BY task_id
FOR UPDATE

-- name: record_verdicts
-- What gates said, and the gate that it has come to now: the next one to run elsewhere, or none.
UPDATE lineshaft.attempt
SET verdicts = coalesce(attempt.verdicts, '[]') || input.verdicts,
    gate_no = input.gate_no, gate = input.gate, gate_runs = 0, gate_error = NULL,
    gate_since = CASE WHEN input.gate IS NOT NULL THEN clock.now END,
    gate_due_at = CASE WHEN input.gate <> 'human' THEN clock.now END,
    cost_usd = attempt.cost_usd + input.cost
FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(gate_nos)s::smallint[], %(gates)s::text[], %(costs)s::numeric[], %(verdicts)s::jsonb[]
    ) AS input (id, epoch, gate_no, gate, cost, verdicts),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch

-- name: hand_over
-- The gate runs elsewhere: the agent gets its slot, its money and its lock back (by whoever calls), and has no lease to keep. What the attempt
-- cost is booked now; the gates' own cost comes on top.
UPDATE lineshaft.task_live AS live
SET agent_id = NULL, lease_until = NULL, limit_at = NULL, heartbeat_at = NULL, reserved_usd = 0,
    cost_usd = live.cost_usd + live.attempt_cost_usd, attempt_cost_usd = 0
WHERE live.id = ANY (%(ids)s::text[]) AND live.status = 'VALIDATING' AND live.agent_id IS NOT NULL

-- name: charge_tasks
-- What a gate that ran elsewhere has cost.
UPDATE lineshaft.task_live AS live
SET cost_usd = live.cost_usd + input.cost
FROM unnest(%(ids)s::text[], %(costs)s::numeric[]) AS input (id, cost)
WHERE live.id = input.id

-- name: close_accepted
-- The attempt has succeeded: from here on its output is the task's. A gate that ran elsewhere had let go of the agent, who is named again.
-- One whose task is not COMPLETED is missing from the answer.
WITH closed AS (
    UPDATE lineshaft.attempt
    SET outcome = 'completed', ended_at = coalesce(%(now)s::timestamptz, now()), output = NULL, gate = NULL, gate_due_at = NULL
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch)
    JOIN lineshaft.task_end AS ended ON ended.id = input.id AND ended.epoch = input.epoch AND ended.status = 'COMPLETED'
    WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch
    RETURNING attempt.task_id, attempt.epoch, attempt.agent_id
),
named AS (
    UPDATE lineshaft.task_end AS ended
    SET agent_id = closed.agent_id
    FROM closed
    WHERE ended.id = closed.task_id AND ended.epoch = closed.epoch AND ended.agent_id IS NULL
)
SELECT task_id FROM closed

-- name: verdicts
-- What the gates said about each attempt at a task, and what the current one waits for.
SELECT attempt.epoch, attempt.outcome, attempt.gate, attempt.gate_since, attempt.gate_runs, attempt.gate_error, attempt.verdicts
FROM lineshaft.attempt
WHERE attempt.task_id = %(id)s::text AND (attempt.verdicts IS NOT NULL OR attempt.gate IS NOT NULL)
ORDER BY attempt.epoch
