-- name: locks
-- Counts the READY tasks that wait for each lock, by task_live_wants_lock, up to `most`. Tasks of a batch that holds the lock don't wait.
SELECT held.key, held.holder_task_id, held.agent_id, held.token, held.acquired_at, held.expires_at,
    (
        SELECT count(*) FROM (
            SELECT FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.lock_key = held.key
              AND coalesce(live.lock_owner, live.id) <> held.holder_task_id
            LIMIT %(most)s::integer
        ) AS wanting
    )::integer AS waiting
FROM lineshaft.lock AS held
WHERE %(after)s::text IS NULL OR held.key > %(after)s::text
ORDER BY held.key
LIMIT %(limit)s::integer

-- name: breakers
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced
FROM lineshaft.breaker
WHERE %(after)s::text IS NULL OR key > %(after)s::text
ORDER BY key
LIMIT %(limit)s::integer

-- name: breaker
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced
FROM lineshaft.breaker WHERE key = %(key)s::text

-- name: slowdowns
SELECT key, until, reason, signalled_at
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now()) AND (%(after)s::text IS NULL OR key > %(after)s::text)
ORDER BY key
LIMIT %(limit)s::integer

-- name: pauses
SELECT type, since, reason, actor FROM lineshaft.pause ORDER BY type
