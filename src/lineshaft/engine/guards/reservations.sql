-- Reservations of what handlers may use of the rates of a key.

-- name: acquire
SELECT * FROM lineshaft.acquire_1(
    %(task_id)s::text, %(epoch)s::integer, %(id)s::text, %(key)s::text, %(idempotency_key)s::text, %(units)s::jsonb, %(now)s::timestamptz
)

-- name: settle
SELECT lineshaft.settle_1(
    %(task_id)s::text, %(epoch)s::integer, %(id)s::text, %(units)s::jsonb, %(remaining)s::jsonb, %(now)s::timestamptz
) AS verdict

-- name: open_reservations
-- Those of claims that are held, the oldest first.
SELECT reservation.id, reservation.task_id, nullif(reservation.key, '') AS key, reservation.unit, reservation.amount, reservation.taken_at AS since
FROM lineshaft.reservation
JOIN lineshaft.task_live AS live ON live.id = reservation.task_id AND live.epoch = reservation.epoch AND live.lease_until IS NOT NULL
WHERE reservation.quota = %(quota)s::text AND NOT reservation.is_settled
ORDER BY reservation.taken_at, reservation.id
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
