-- name: make_breakers
-- A breaker has a row from its first failure on.
INSERT INTO lineshaft.breaker (key) SELECT unnest(%(keys)s::text[]) ORDER BY 1 ON CONFLICT (key) DO NOTHING

-- name: lock_breakers
-- The last rows that a transaction locks, always in this order.
SELECT coalesce(%(now)s::timestamptz, now()) AS now, key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_at,
    probe_task_id, forced, losses::text AS losses
FROM lineshaft.breaker
WHERE key = ANY (%(keys)s::text[])
ORDER BY key
FOR NO KEY UPDATE

-- name: write_breakers
-- Writes rows that lock_breakers holds, with their events. Waiters look for work again when a breaker has closed.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
input AS MATERIALIZED (
    SELECT * FROM unnest(
        %(keys)s::text[], %(states)s::text[], %(failures)s::integer[], %(last_failures)s::timestamptz[], %(opened_at)s::timestamptz[],
        %(half_open_at)s::timestamptz[], %(probe_at)s::timestamptz[], %(probes)s::text[], %(forced)s::boolean[], %(losses)s::jsonb[],
        %(kinds)s::text[], %(data)s::jsonb[]
    ) AS input (key, state, failures, last_failure, opened_at, half_open_at, probe_at, probe, forced, losses, kinds, data)
),
written AS (
    UPDATE lineshaft.breaker
    SET state = input.state::lineshaft.breaker_state, failures = input.failures, last_failure = input.last_failure,
        opened_at = input.opened_at, half_open_at = input.half_open_at, probe_at = input.probe_at, probe_task_id = input.probe,
        forced = input.forced, losses = input.losses
    FROM input
    WHERE breaker.key = input.key
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT clock.now, input.kinds::text[], input.data FROM input CROSS JOIN clock WHERE input.kinds IS NOT NULL
)
SELECT pg_notify(lineshaft.channel(), '*') FROM input WHERE kinds LIKE '%%breaker.closed%%' HAVING count(*) > 0

-- name: free_lost_probes
-- Probes whose task is not running. There should be none: a half-open breaker without its probe would never close.
WITH lost AS MATERIALIZED (
    SELECT breaker.key
    FROM lineshaft.breaker
    WHERE breaker.state <> 'closed' AND breaker.probe_task_id IS NOT NULL
      AND NOT EXISTS (
        SELECT FROM lineshaft.task_live AS live
        WHERE live.id = breaker.probe_task_id AND live.status IN ('CLAIMED', 'RUNNING', 'VALIDATING')
      )
    ORDER BY breaker.key
    FOR NO KEY UPDATE OF breaker SKIP LOCKED
),
freed AS (UPDATE lineshaft.breaker SET probe_task_id = NULL FROM lost WHERE breaker.key = lost.key RETURNING breaker.key),
woken AS (SELECT pg_notify(lineshaft.channel(), '*') FROM freed HAVING count(*) > 0)
SELECT freed.key, (SELECT count(*) FROM woken) AS notified FROM freed

-- name: read_policy
SELECT breakers FROM lineshaft.limits
