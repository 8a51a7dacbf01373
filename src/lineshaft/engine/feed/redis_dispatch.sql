-- name: identity
-- Of this database among all: several may share a Redis.
SELECT concat_ws('.', (SELECT system_identifier FROM pg_control_system()), oid) AS id
FROM pg_database WHERE datname = current_database()

-- name: notify
SELECT pg_notify(lineshaft.channel(), %(lanes)s::text)

-- name: notify_others
-- If a process listens without Redis: one of a previous version, or without the setting. One that begins to listen after this statement
-- looks for work afterwards.
SELECT pg_notify(lineshaft.channel(), %(lanes)s::text)
WHERE EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = %(name)s::text
)

-- name: forgotten_lanes
-- Lanes whose next task has been claimable for so long that its wake-up was probably lost.
WITH RECURSIVE clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation),
waiting AS (
    -- include: waiting_lanes
)
SELECT lane_id FROM (
    SELECT lane_id, ready_at FROM lineshaft.task_live
    WHERE status = 'READY' AND parked = 'fair' AND parked_key IS NULL
    ORDER BY lane_id, rank, submission_no LIMIT %(most)s::integer
) AS turn
WHERE turn.ready_at < (SELECT now FROM clock) - make_interval(secs => %(age)s::double precision)
UNION
SELECT waiting.lane_id
FROM (SELECT * FROM waiting LIMIT %(most)s::integer) AS waiting
CROSS JOIN LATERAL (
    SELECT ready_at FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = waiting.generation AND lane_id = waiting.lane_id
      AND rank = waiting.rank AND submission_no = waiting.submission_no
    LIMIT 1
) AS head
WHERE head.ready_at < (SELECT now FROM clock) - make_interval(secs => %(age)s::double precision)
