-- name: start_tasks
-- A row moves only if its status and epoch are as expected; a task that didn't move is missing from the result.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
started AS (
    UPDATE lineshaft.task_live AS live
    SET status = 'RUNNING', started_at = clock.now, first_started_at = coalesce(live.first_started_at, clock.now), heartbeat_at = clock.now,
        limit_at = clock.now + make_interval(secs => live.limit_sec),
        lease_until = clock.now + make_interval(secs => least(3 * coalesce(live.heartbeat_sec, instance.heartbeat_interval_sec), live.limit_sec))
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch), lineshaft.instance, clock
    WHERE live.id = input.id AND live.epoch = input.epoch AND live.status = 'CLAIMED' AND instance.agent_id = live.agent_id
      AND instance.incarnation = live.incarnation
    RETURNING live.id, live.dag_id, live.agent_id, live.epoch
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
    SELECT clock.now, '{task.started}', started.id, started.dag_id, started.agent_id, started.epoch FROM started CROSS JOIN clock
)
SELECT id FROM started
