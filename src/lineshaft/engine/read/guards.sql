-- name: locks
-- Counts the READY tasks that wait for each lock, by task_live_wants_lock, up to `most`. Tasks of a batch that holds the lock don't wait;
-- nor do tasks that read what others read, until a claim has parked them behind a writer.
SELECT held.key, held.holder_task_id, held.agent_id, held.token, held.acquired_at, held.expires_at, held.shared,
    (
        SELECT count(*) FROM (
            SELECT FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.lock_key = held.key
              AND coalesce(live.lock_owner, live.id) <> held.holder_task_id
              AND (live.parked = 'lock' OR NOT held.shared)
            LIMIT %(most)s::integer
        ) AS wanting
    )::integer AS waiting
FROM (
    (
        SELECT key, holder_task_id, agent_id, token, acquired_at, expires_at, false AS shared
        FROM lineshaft.lock
        WHERE NOT holder_task_id LIKE 'shared:%%' AND (%(after)s::text IS NULL OR key > %(after)s::text)
        ORDER BY key
        LIMIT %(limit)s::integer
    )
    UNION ALL
    (
        SELECT key, holder_task_id, agent_id, token, acquired_at, expires_at, true
        FROM lineshaft.lock_share
        WHERE %(after)s::text IS NULL OR (key, holder_task_id) > (%(after)s::text, coalesce(%(after_holder)s::text, ''))
        ORDER BY key, holder_task_id
        LIMIT %(limit)s::integer
    )
) AS held
ORDER BY held.key, held.holder_task_id
LIMIT %(limit)s::integer

-- name: breakers
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced, probe_at
FROM lineshaft.breaker
WHERE %(after)s::text IS NULL OR key > %(after)s::text
ORDER BY key
LIMIT %(limit)s::integer

-- name: breaker
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced, probe_at
FROM lineshaft.breaker WHERE key = %(key)s::text

-- name: slowdowns
SELECT key, until, reason, signalled_at
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now()) AND (%(after)s::text IS NULL OR key > %(after)s::text)
ORDER BY key
LIMIT %(limit)s::integer

-- name: pauses
SELECT type, since, reason, actor FROM lineshaft.pause ORDER BY type

-- name: short_dags
-- By task_live_budget_waiters; of all DAGs, `most` waiting tasks are counted.
SELECT dag.id, dag.title, dag.budget_ceiling_usd, dag.spent_usd, dag.reserved_usd, parked.waiting
FROM (
    SELECT dag_id, count(*)::integer AS waiting
    FROM (SELECT dag_id FROM lineshaft.task_live WHERE parked = 'dag_budget' ORDER BY dag_id LIMIT %(most)s::integer) AS waiter
    GROUP BY dag_id
    ORDER BY 2 DESC, dag_id
    LIMIT %(limit)s::integer
) AS parked
JOIN lineshaft.dag ON dag.id = parked.dag_id
WHERE dag.budget_ceiling_usd IS NOT NULL
ORDER BY parked.waiting DESC, dag.id
