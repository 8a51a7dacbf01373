-- name: delete_lock
-- The holder continues with a fencing number that is out of date.
WITH gone AS MATERIALIZED (
    SELECT key, holder_task_id, agent_id
    FROM lineshaft.release_locks_1(ARRAY[%(key)s::text], ARRAY[%(holder)s::text], NULL, NULL)
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{lock.expired}', gone.holder_task_id, gone.agent_id,
        jsonb_build_object('key', gone.key, 'by_hand', true) || %(act)s::jsonb
    FROM gone
)
SELECT key FROM gone
