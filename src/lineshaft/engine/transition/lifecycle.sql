-- A task in its agent's hands. Used by store/lifecycle.py.
--
-- Every statement takes arrays and moves a batch. A row moves only if its status and epoch are as expected; what didn't move is
-- missing from the answer, and Python finds out why.

-- name: start_tasks
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
started AS (
    UPDATE lineshaft.task_live AS live
    SET status = 'RUNNING', started_at = clock.now, first_started_at = coalesce(live.first_started_at, clock.now), heartbeat_at = clock.now,
        limit_at = clock.now + make_interval(secs => live.limit_sec),
        lease_until = clock.now + make_interval(secs => least(3 * coalesce(live.heartbeat_sec, agent.heartbeat_interval_sec), live.limit_sec))
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch), lineshaft.agent, clock
    WHERE live.id = input.id AND live.epoch = input.epoch AND live.status = 'CLAIMED' AND agent.id = live.agent_id
    RETURNING live.id, live.dag_id, live.agent_id, live.epoch
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
    SELECT clock.now, '{task.started}', started.id, started.dag_id, started.agent_id, started.epoch FROM started CROSS JOIN clock
)
SELECT id FROM started

-- name: save_step
-- Fenced by the claim. A step that is recorded already keeps its first result.
INSERT INTO lineshaft.step (task_id, name, epoch, recorded_at, cost_usd, data)
SELECT live.id, %(name)s::text, live.epoch, coalesce(%(now)s::timestamptz, now()), %(cost)s::numeric, %(data)s::jsonb
FROM lineshaft.task_live AS live
WHERE live.id = %(id)s::text AND live.epoch = %(epoch)s::integer AND live.status = 'RUNNING'
FOR KEY SHARE OF live
ON CONFLICT (task_id, name) DO UPDATE SET name = excluded.name
RETURNING data, epoch

-- name: save_checkpoint
INSERT INTO lineshaft.checkpoint (task_id, epoch, recorded_at, data)
SELECT live.id, live.epoch, coalesce(%(now)s::timestamptz, now()), %(data)s::jsonb
FROM lineshaft.task_live AS live
WHERE live.id = %(id)s::text AND live.epoch = %(epoch)s::integer AND live.status IN ('CLAIMED', 'RUNNING')
FOR KEY SHARE OF live
ON CONFLICT (task_id) DO UPDATE SET data = excluded.data, epoch = excluded.epoch, recorded_at = excluded.recorded_at
RETURNING task_id
