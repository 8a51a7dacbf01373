-- name: wake_ready
-- Tasks that were just made READY by requeue_tasks.
SELECT
    -- include: notify_lanes
FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[]) AND status = 'READY' HAVING count(*) > 0

-- name: wake_all
SELECT pg_notify(lineshaft.channel(), '*')
