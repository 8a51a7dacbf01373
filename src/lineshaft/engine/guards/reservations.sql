-- Reservations of what handlers may use of the rates of a key.

-- name: acquire
SELECT * FROM lineshaft.acquire_1(
    %(task_id)s::text, %(epoch)s::integer, %(id)s::text, %(key)s::text, %(idempotency_key)s::text, %(units)s::jsonb, %(now)s::timestamptz
)

-- name: settle
SELECT lineshaft.settle_1(
    %(task_id)s::text, %(epoch)s::integer, %(id)s::text, %(units)s::jsonb, %(remaining)s::jsonb, %(now)s::timestamptz
) AS verdict

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
