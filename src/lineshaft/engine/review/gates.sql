-- The row of the attempt has the output, its current gate, and the verdicts so far. `gate` is NULL while the agent holds the task; once the
-- output waits for a gate that runs elsewhere, the task is not held and `gate` is the method of that gate.

-- name: read_in_validation
SELECT live.id, live.epoch, attempt.gate_no, attempt.gate, task.type, task.title, task.spec, task.gates, task.require_decision_report,
    attempt.output
FROM lineshaft.task_live AS live
JOIN lineshaft.attempt ON attempt.task_id = live.id AND attempt.epoch = live.epoch
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = ANY (%(ids)s::text[]) AND live.status = 'VALIDATING' AND attempt.outcome = 'validating'

-- name: take_gates
-- Outputs that wait for one of these gates and that no other validator has, under a lease (see renew_gates). Rows are locked for this
-- statement only. By attempt_gated.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
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
    task.require_decision_report, taken.output, false AS is_paid
FROM taken JOIN lineshaft.task ON task.id = taken.task_id

-- name: renew_gates
-- Returns only outputs that the validator still has.
UPDATE lineshaft.attempt
SET gate_due_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(lease)s::double precision)
FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(gate_nos)s::smallint[], %(runs)s::integer[]) AS mine (id, epoch, gate_no, runs)
WHERE attempt.task_id = mine.id AND attempt.epoch = mine.epoch AND attempt.gate_no = mine.gate_no AND attempt.gate_runs = mine.runs
  AND attempt.outcome = 'validating'
RETURNING attempt.task_id

-- name: postpone_gate
-- No verdict: the gate runs again later.
UPDATE lineshaft.attempt
SET gate_due_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(delay)s::double precision),
    gate_error = %(error)s::text
WHERE task_id = %(id)s::text AND epoch = %(epoch)s::integer AND gate_no = %(gate_no)s::smallint AND gate_runs = %(runs)s::integer
  AND outcome = 'validating'
RETURNING task_id

-- name: lock_attempts
-- Under the locks of their tasks.
SELECT task_id, epoch, gate_no, agent_id, output
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome = 'validating'
ORDER BY task_id
FOR UPDATE

-- name: record_verdicts
-- gate: the next one that runs elsewhere; NULL: none.
UPDATE lineshaft.attempt
SET verdicts = coalesce(attempt.verdicts, '[]') || input.verdicts,
    gate_no = input.gate_no, gate = input.gate, gate_runs = 0, gate_error = NULL, gate_blocked_by = NULL,
    gate_since = CASE WHEN input.gate IS NOT NULL THEN clock.now END,
    gate_due_at = CASE WHEN input.gate <> 'human' THEN clock.now END
FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(gate_nos)s::smallint[], %(gates)s::text[], %(verdicts)s::jsonb[]
    ) AS input (id, epoch, gate_no, gate, verdicts),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch

-- name: release_agents
-- The gate runs elsewhere. The caller returns slot, money and lock. The cost of the attempt is booked now; the cost of gates is added.
UPDATE lineshaft.task_live AS live
SET agent_id = NULL, incarnation = NULL, has_slots = false, lease_until = NULL, limit_at = NULL, heartbeat_at = NULL, reserved_usd = 0,
    agent_reserved = false, day_reserved = false, lock_token = NULL,
    cost_usd = live.cost_usd + live.attempt_cost_usd, attempt_cost_usd = 0
WHERE live.id = ANY (%(ids)s::text[]) AND live.status = 'VALIDATING' AND live.agent_id IS NOT NULL

-- name: close_accepted
-- The output moves to the task. A gate that ran elsewhere had released the agent, which is recorded again. Returns only COMPLETED tasks.
WITH closed AS (
    UPDATE lineshaft.attempt
    SET outcome = 'completed', ended_at = coalesce(%(now)s::timestamptz, now()), output = NULL, gate = NULL, gate_due_at = NULL
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch)
    JOIN lineshaft.task_end AS ended ON ended.id = input.id AND ended.epoch = input.epoch AND ended.status = 'COMPLETED'
    WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch
    RETURNING attempt.task_id, attempt.epoch, attempt.agent_id, attempt.incarnation
),
named AS (
    UPDATE lineshaft.task_end AS ended
    SET agent_id = closed.agent_id, incarnation = closed.incarnation
    FROM closed
    WHERE ended.id = closed.task_id AND ended.epoch = closed.epoch AND ended.agent_id IS NULL
)
SELECT task_id FROM closed
