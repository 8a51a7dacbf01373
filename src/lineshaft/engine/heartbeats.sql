-- name: heartbeat
-- One statement for everything that a process holds: the leases of all its tasks and the presence of all its agents. It waits for no row: a
-- locked row is just being moved by another transaction, and the lease lasts for three intervals. So no heartbeat is part of a deadlock.
-- Each row is found through an index, never by a join of two lists: the cost is linear in the number of tasks.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
input AS MATERIALIZED (
    SELECT * FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(holders)s::text[], %(progress)s::jsonb[]
    ) AS input (id, epoch, holder, progress)
),
unlocked AS MATERIALIZED (
    SELECT live.id, coalesce(live.heartbeat_sec, instance.heartbeat_interval_sec) AS interval_sec, input.progress
    FROM input
    JOIN lineshaft.task_live AS live ON live.id = input.id
    JOIN lineshaft.instance ON instance.agent_id = live.agent_id AND instance.incarnation = live.incarnation
    WHERE live.epoch = input.epoch AND live.agent_id = input.holder AND live.status IN ('RUNNING', 'VALIDATING')
      -- A claim that lost its document lock isn't renewed: it can't complete. (An output that is being checked counts as completed.)
      AND (
        live.lock_token IS NULL OR live.status = 'VALIDATING'
        OR
        -- include: has_locks
      )
    FOR NO KEY UPDATE OF live SKIP LOCKED
),
renewed AS (
    UPDATE lineshaft.task_live AS live
    SET heartbeat_at = clock.now,
        lease_until = least(clock.now + make_interval(secs => 3 * unlocked.interval_sec), live.limit_at),
        progress = coalesce(unlocked.progress, live.progress)
    FROM unlocked, clock
    WHERE live.id = unlocked.id
    RETURNING live.id, live.dag_id, live.epoch, live.agent_id, live.lock_key, live.admission, live.lock_token,
        unlocked.interval_sec, unlocked.progress
),
needed AS MATERIALIZED (
    SELECT lock.key, renewed.lock_token AS token, renewed.interval_sec
    FROM renewed CROSS JOIN LATERAL unnest(lineshaft.lock_keys_1(renewed.lock_key, renewed.admission)) AS lock (key)
    WHERE renewed.lock_token IS NOT NULL
),
own_lock AS MATERIALIZED (
    SELECT lock.key, needed.interval_sec
    FROM lineshaft.lock
    JOIN needed ON needed.key = lock.key AND lock.token = needed.token AND NOT lock.holder_task_id LIKE 'shared:%%'
    FOR NO KEY UPDATE OF lock SKIP LOCKED
),
own_share AS MATERIALIZED (
    SELECT share.key, share.holder_task_id, needed.interval_sec
    FROM lineshaft.lock_share AS share
    JOIN needed ON share.token = needed.token AND share.key = needed.key
    FOR NO KEY UPDATE OF share SKIP LOCKED
),
share_renewed AS (
    UPDATE lineshaft.lock_share AS share
    SET expires_at = clock.now + make_interval(secs => greatest(%(lock_ttl)s::double precision, 3 * own_share.interval_sec))
    FROM own_share, clock
    WHERE share.key = own_share.key AND share.holder_task_id = own_share.holder_task_id
),
lock_renewed AS (
    UPDATE lineshaft.lock
    SET expires_at = clock.now + make_interval(secs => greatest(%(lock_ttl)s::double precision, 3 * own_lock.interval_sec))
    FROM own_lock, clock
    WHERE lock.key = own_lock.key
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
    SELECT clock.now, '{task.progress}', renewed.id, renewed.dag_id, renewed.agent_id, renewed.epoch, renewed.progress
    FROM renewed CROSS JOIN clock WHERE renewed.progress IS NOT NULL
),
present AS MATERIALIZED (
    SELECT instance.agent_id, instance.incarnation
    FROM lineshaft.instance
    JOIN unnest(%(agents)s::text[], %(incarnations)s::integer[]) AS own (id, incarnation)
      ON instance.agent_id = own.id AND instance.incarnation = own.incarnation
    FOR NO KEY UPDATE OF instance SKIP LOCKED
),
touched AS (
    UPDATE lineshaft.instance
    SET last_heartbeat = clock.now, silence_reported = false
    FROM present, clock
    WHERE instance.agent_id = present.agent_id AND instance.incarnation = present.incarnation
),
lowered AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM lineshaft.pause WHERE stops)
        OR EXISTS (SELECT FROM lineshaft.limits, clock WHERE daily_budget_cut >= (clock.now AT TIME ZONE 'UTC')::date)
        OR EXISTS (SELECT FROM lineshaft.agent WHERE id = ANY (%(holders)s::text[]) AND budget_cut) AS any_limit
)
SELECT input.id AS task_id, input.epoch, NULL AS agent_id, NULL::integer AS incarnation,
    CASE
        WHEN live.epoch = input.epoch AND live.agent_id = input.holder AND live.lock_token IS NOT NULL AND live.status <> 'VALIDATING'
            AND
            -- include: has_locks
            IS NOT TRUE THEN 'unlocked'
        -- Renewed, locked by another transaction, or not started yet: held.
        WHEN live.epoch = input.epoch AND live.agent_id = input.holder THEN 'continue'
        WHEN ended.status = 'CANCELLED' THEN 'cancel'
        ELSE 'lost'
    END AS answer,
    -- Whether the holder may have to stop, though the claim is still its own: limits_reached decides. Rare, and most of the cost if it were
    -- decided here. What is within its reservation stops only when a limit was lowered, for the velocity stop, or because of what earlier
    -- attempts have cost.
    live.epoch = input.epoch AND live.agent_id = input.holder AND live.status IN ('CLAIMED', 'RUNNING') AND (
        live.attempt_cost_usd > live.reserved_usd
        OR live.cost_usd > 0
        OR (SELECT any_limit FROM lowered)
        OR (SELECT dag.budget_cut FROM lineshaft.dag WHERE dag.id = live.dag_id)
    ) AS at_risk,
    NULL::integer AS slots,
    NULL::timestamptz AS slowdown_until,
    -- A hashed subplan: a join of the two lists would be quadratic.
    (input.id, input.epoch) IN (SELECT renewed.id, renewed.epoch FROM renewed) AS renewed
FROM input
-- One process may report two claims of a task: one that it lost, and one that another agent in it has now.
LEFT JOIN lineshaft.task_live AS live ON live.id = input.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = input.id
UNION ALL
-- An instance without an answer was superseded, or is unknown.
SELECT NULL, NULL, instance.agent_id, instance.incarnation, coalesce(instance.set_status, instance.status)::text,
    NULL, coalesce(instance.set_max_tasks, instance.max_concurrent_tasks),
    -- include: slowdown_until
    , NULL
FROM lineshaft.instance
JOIN unnest(%(agents)s::text[], %(incarnations)s::integer[]) AS own (id, incarnation)
  ON instance.agent_id = own.id AND instance.incarnation = own.incarnation
