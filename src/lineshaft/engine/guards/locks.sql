-- name: delete_lock
-- The holder continues with a fencing number that is out of date.
WITH gone AS (
    DELETE FROM lineshaft.lock
    WHERE key = %(key)s::text AND holder_task_id = coalesce(%(holder)s::text, holder_task_id)
    RETURNING key, holder_task_id, agent_id
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{lock.expired}', gone.holder_task_id, gone.agent_id,
        jsonb_build_object('key', gone.key, 'by_hand', true) || %(act)s::jsonb
    FROM gone
)
SELECT key FROM gone
