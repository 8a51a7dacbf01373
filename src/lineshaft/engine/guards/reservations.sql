-- Reservations of what handlers may use of the rates of a key.

-- name: acquire
SELECT * FROM lineshaft.acquire_1(
    %(task_id)s::text, %(epoch)s::integer, %(id)s::text, %(key)s::text, %(idempotency_key)s::text, %(units)s::jsonb, %(now)s::timestamptz
)

-- name: settle
SELECT lineshaft.settle_1(
    %(task_id)s::text, %(epoch)s::integer, %(id)s::text, %(units)s::jsonb, %(remaining)s::jsonb, %(now)s::timestamptz
) AS verdict

-- name: users
-- Held tasks and what they have acquired within the window, of the newest reservations: whoever has most first.
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

-- name: delete_ended_reservations
-- A claim that isn't held never settles again.
DELETE FROM lineshaft.reservation
WHERE (id, quota) IN (
    SELECT ended.id, ended.quota FROM lineshaft.reservation AS ended
    WHERE NOT EXISTS (
        SELECT FROM lineshaft.task_live AS live
        WHERE live.id = ended.task_id AND live.epoch = ended.epoch AND live.lease_until IS NOT NULL
    )
    ORDER BY ended.id LIMIT %(limit)s::integer
)
RETURNING true
