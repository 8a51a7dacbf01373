-- name: record_steps
-- Fenced by the claim. A step that is recorded already keeps its first result, unless it ran again under a later claim because its arguments
-- have another digest. Follows `spend` in the same transaction: a step that isn't run again is paid for, however the attempt ends.
WITH held AS MATERIALIZED (
    SELECT live.id, live.epoch, input.name, input.data, input.digest, input.cost
    FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(names)s::text[], %(data)s::jsonb[], %(digests)s::text[], %(costs)s::numeric[]
    ) AS input (id, epoch, name, data, digest, cost)
    JOIN lineshaft.task_live AS live ON live.id = input.id
    WHERE live.epoch = input.epoch AND live.status = 'RUNNING'
    ORDER BY live.id
    FOR NO KEY UPDATE OF live
),
recorded AS (
    INSERT INTO lineshaft.step AS step (task_id, name, epoch, recorded_at, digest, cost_usd, data)
    SELECT held.id, held.name, held.epoch, coalesce(%(now)s::timestamptz, now()), held.digest, held.cost, held.data FROM held
    ON CONFLICT (task_id, name) DO UPDATE
    SET data = CASE WHEN step.digest <> excluded.digest AND step.epoch < excluded.epoch THEN excluded.data ELSE step.data END,
        recorded_at = CASE WHEN step.digest <> excluded.digest AND step.epoch < excluded.epoch THEN excluded.recorded_at ELSE step.recorded_at END,
        -- Both runs were paid for.
        cost_usd = CASE
            WHEN step.digest <> excluded.digest AND step.epoch < excluded.epoch THEN step.cost_usd + excluded.cost_usd ELSE step.cost_usd
        END,
        digest = CASE WHEN step.digest <> excluded.digest AND step.epoch < excluded.epoch THEN excluded.digest ELSE step.digest END,
        epoch = CASE WHEN step.digest <> excluded.digest AND step.epoch < excluded.epoch THEN excluded.epoch ELSE step.epoch END
    RETURNING task_id, name, data
),
-- The holder of a task may record the step of a wait itself, when its claim had the signal: then that is received.
waited AS (
    DELETE FROM lineshaft.wait USING recorded WHERE wait.task_id = recorded.task_id AND wait.name = recorded.name
    RETURNING wait.task_id, wait.signal
),
received AS (
    UPDATE lineshaft.signal
    SET received_at = coalesce(%(now)s::timestamptz, now()), data = NULL
    FROM waited
    CROSS JOIN LATERAL (
        SELECT signal.no FROM lineshaft.signal
        WHERE signal.task_id = waited.task_id AND signal.received_at IS NULL AND signal.name = waited.signal
        ORDER BY signal.no LIMIT 1
    ) AS first
    WHERE signal.task_id = waited.task_id AND signal.no = first.no
)
SELECT recorded.task_id, recorded.name, recorded.data,
    task.max_total_cost_usd - live.cost_usd - live.attempt_cost_usd AS task_left,
    agent.budget_usd - agent.spent_usd - agent.reserved_usd AS agent_left,
    dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd AS dag_left
FROM recorded
JOIN lineshaft.task_live AS live ON live.id = recorded.task_id
JOIN lineshaft.task ON task.id = recorded.task_id
LEFT JOIN lineshaft.agent ON agent.id = live.agent_id
LEFT JOIN lineshaft.dag ON dag.id = live.dag_id

-- name: receive_signals
-- Those that a step acknowledges by their ids. Follows record_steps, which has locked the task.
UPDATE lineshaft.signal
SET received_at = coalesce(%(now)s::timestamptz, now()), data = NULL
WHERE task_id = %(id)s::text AND received_at IS NULL AND id = ANY (%(received)s::text[])

-- name: save_checkpoints
INSERT INTO lineshaft.checkpoint (task_id, epoch, recorded_at, data)
SELECT held.id, held.epoch, coalesce(%(now)s::timestamptz, now()), held.data
FROM (
    SELECT live.id, live.epoch, input.data
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(data)s::jsonb[]) AS input (id, epoch, data)
    JOIN lineshaft.task_live AS live ON live.id = input.id
    WHERE live.epoch = input.epoch AND live.status IN ('CLAIMED', 'RUNNING')
    ORDER BY live.id
    FOR KEY SHARE OF live
) AS held
ON CONFLICT (task_id) DO UPDATE SET data = excluded.data, epoch = excluded.epoch, recorded_at = excluded.recorded_at
RETURNING task_id

-- name: read_step
SELECT data, epoch FROM lineshaft.step WHERE task_id = %(id)s::text AND name = %(name)s::text

-- name: insert_step
INSERT INTO lineshaft.step (task_id, name, epoch, recorded_at, data)
VALUES (%(id)s::text, %(name)s::text, %(epoch)s::integer, coalesce(%(now)s::timestamptz, now()), %(data)s::jsonb)

-- name: forget_steps
-- Recorded results, so that these steps run again. Without names all of them; but the records of spawned tasks only with `spawned`: those
-- would be spawned a second time. Guarded by row locks of the tasks.
DELETE FROM lineshaft.step
WHERE task_id = ANY (%(ids)s::text[])
  AND CASE
      WHEN %(names)s::text[] IS NULL THEN name NOT LIKE %(spawn)s::text OR %(spawned)s::boolean ELSE name = ANY (%(names)s::text[])
  END
RETURNING task_id, name

-- name: forget_signals
DELETE FROM lineshaft.signal WHERE task_id = ANY (%(ids)s::text[])
