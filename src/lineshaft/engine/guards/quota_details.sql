-- A quota with its keys, and the tasks that use it and wait for it.

-- name: keys
-- The busiest first.
SELECT nullif(counted.key, '') AS key, sum(counted.running)::integer AS running, sum(counted.waiting)::integer AS waiting, sum(counted.used) AS used
FROM lineshaft.quota
CROSS JOIN LATERAL (
    SELECT CASE WHEN quota.shares_limit THEN '' ELSE slot.key END AS key, 1 AS running, 0 AS waiting, 0::numeric AS used
    FROM lineshaft.slot
    JOIN lineshaft.task_live AS holder ON holder.id = slot.task_id AND holder.epoch = slot.epoch AND holder.lease_until IS NOT NULL
    WHERE slot.quota = quota.name
    UNION ALL
    SELECT CASE WHEN quota.shares_limit THEN '' ELSE parked.key END, 0, 1, 0
    FROM (
        SELECT substr(waiter.parked_key, length(quota.name) + 2) AS key FROM lineshaft.task_live AS waiter
        WHERE waiter.parked_key >= quota.name || chr(31) AND waiter.parked_key < quota.name || chr(32)
        LIMIT 10000
    ) AS parked
    UNION ALL
    SELECT quota_use.key, 0, 0, quota_use.amount FROM lineshaft.quota_use
    WHERE quota_use.quota = quota.name
      AND quota_use.part >= lineshaft.part_1(coalesce(%(now)s::timestamptz, now()), quota.rate_per_sec) - 60
) AS counted
WHERE quota.name = %(quota)s::text
GROUP BY counted.key
ORDER BY 2 DESC, 4 DESC, 3 DESC, 1
LIMIT %(limit)s::integer

-- name: users
-- Held tasks and what they have acquired within the window, of the newest reservations: those with the most first.
SELECT recent.task_id, nullif(recent.key, '') AS key, live.agent_id, sum(recent.amount) AS amount, count(*)::integer AS reservations,
    max(recent.taken_at) AS last_at
FROM lineshaft.quota
CROSS JOIN LATERAL (
    SELECT * FROM lineshaft.reservation
    WHERE reservation.quota = quota.name
      AND reservation.taken_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => quota.rate_per_sec)
    ORDER BY reservation.taken_at DESC LIMIT 10000
) AS recent
JOIN lineshaft.task_live AS live ON live.id = recent.task_id AND live.epoch = recent.epoch AND live.lease_until IS NOT NULL
WHERE quota.name = %(quota)s::text
GROUP BY recent.task_id, recent.key, live.agent_id
ORDER BY amount DESC, recent.task_id, recent.key
LIMIT %(limit)s::integer

-- name: waiters
SELECT waiter.id AS task_id, nullif(substr(waiter.parked_key, length(%(quota)s::text) + 2), '') AS key, task.type, task.title, waiter.ready_at
FROM (
    SELECT live.id, live.parked_key, live.ready_at FROM lineshaft.task_live AS live
    WHERE live.parked_key >= %(quota)s::text || chr(31) AND live.parked_key < %(quota)s::text || chr(32)
    LIMIT 10000
) AS waiter
JOIN lineshaft.task ON task.id = waiter.id
ORDER BY waiter.ready_at, waiter.id
LIMIT %(limit)s::integer
