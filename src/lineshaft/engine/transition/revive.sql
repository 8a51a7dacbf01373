-- name: fair_tasks_exist
SELECT lineshaft.fair_tasks_exist_1() WHERE EXISTS (SELECT FROM lineshaft.task WHERE task.id = ANY (%(ids)s::text[]) AND task.admission ? 'fair')

-- name: revive_tasks
-- Ended tasks → PENDING or READY: counters start at 0, the epoch continues, so that no earlier claim matches. An edge to a task that has
-- completed in the meantime is satisfied; all others count. Guarded by the row locks that read_revivable holds.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
ended AS (
    DELETE FROM lineshaft.task_end
    USING unnest(%(ids)s::text[], %(lane_ids)s::integer[], %(delays)s::double precision[], %(lock_owners)s::text[])
        AS input (id, lane_id, delay, lock_owner)
    WHERE task_end.id = input.id
    RETURNING task_end.*, input.lane_id, input.delay, input.lock_owner
)
INSERT INTO lineshaft.task_live (
    id, dag_id, status, lane_id, priority, downstream, blocked, deadline, rank, rekey_at, ready_at, due_at, generation, lock_key, admission,
    lock_owner, heartbeat_sec, limit_sec, is_batch, is_gated, epoch, revivals, cost_usd, tokens_input, tokens_output, first_started_at,
    awaited, expires, max_cost_usd, max_total_cost_usd, last_account, parked
)
SELECT
    task.id, dag.id,
    CASE WHEN open.n > 0 OR ended.delay > 0 OR task.is_batch THEN 'PENDING' ELSE 'READY' END::lineshaft.task_status,
    ended.lane_id, task.priority, 0, open.n, task.deadline,
    lineshaft.rank(task.priority, 0::smallint, lane.boost_per_minute, clock.now, task.deadline, clock.now),
    -- A deadline that passed since the task ended must still be logged; one that passed before has been.
    coalesce(lineshaft.rekey_at(task.deadline, clock.now), CASE WHEN ended.ended_at < task.deadline THEN task.deadline END),
    CASE WHEN open.n > 0 OR ended.delay > 0 OR task.is_batch THEN NULL ELSE clock.now END,
    CASE
        WHEN ended.delay > 0 THEN clock.now + make_interval(secs => ended.delay)
        -- Its children have all ended: the caller ends it in this transaction.
        WHEN task.is_batch AND open.n = 0 THEN clock.now
    END,
    (SELECT last_value FROM lineshaft.generation_no),
    lineshaft.first_lock_1(task.lock_key, task.admission), task.admission, ended.lock_owner, task.heartbeat_interval_sec, task.max_duration_sec, task.is_batch,
    task.gates IS NOT NULL OR task.require_decision_report, ended.epoch, ended.revivals + 1,
    ended.cost_usd, ended.tokens_input, ended.tokens_output, ended.first_started_at,
    -- Perhaps: a dependent that was added after the task ended didn't mark it.
    true, task.expire_at_deadline, task.max_cost_usd, task.max_total_cost_usd, ended.account, CASE WHEN task.admission ? 'fair' THEN 'fair' END
FROM ended
JOIN lineshaft.task ON task.id = ended.id
JOIN lineshaft.lane ON lane.id = ended.lane_id
CROSS JOIN clock
LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
CROSS JOIN LATERAL (
    SELECT count(*)::integer AS n FROM lineshaft.edge WHERE edge.task_id = task.id AND NOT edge.satisfied
) AS open
RETURNING id, dag_id, status::text AS status, epoch, is_batch AND blocked = 0 AS batch_done

-- name: read_revivable
-- What a revival needs: the lane of the task's own preferences, its key, and whether it is a batch.
SELECT task.id, ended.status::text AS status, task.type, task.required_capabilities, task.model_preferences,
    task.priority_boost_per_minute, task.max_cost_usd, task.max_total_cost_usd, ended.cost_usd, task.idempotency_key, task.spec, task.is_batch,
    task.deadline,
    task.expire_at_deadline AND task.deadline <= coalesce(%(now)s::timestamptz, now()) AS expired,
    -- Batches around it that need a lock of it, the outermost first. The children of a list have their locks themselves: several run at once.
    ARRAY(
        WITH RECURSIVE around AS (
            SELECT batch.id, batch.parent_id, batch.lock_key, batch.admission, 1 AS distance
            FROM lineshaft.task AS batch WHERE batch.id = task.parent_id AND batch.is_batch AND batch.for_each IS NULL
            UNION ALL
            SELECT batch.id, batch.parent_id, batch.lock_key, batch.admission, around.distance + 1
            FROM around JOIN lineshaft.task AS batch ON batch.id = around.parent_id AND batch.is_batch
        )
        SELECT around.id FROM around
        WHERE lineshaft.lock_keys_1(around.lock_key, around.admission) && lineshaft.lock_keys_1(task.lock_key, task.admission)
        ORDER BY around.distance DESC
    ) AS lock_owners
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
WHERE ended.id = ANY (%(ids)s::text[])
ORDER BY ended.id
FOR UPDATE OF ended

-- name: retake_keys
-- A revived task takes its idempotency key again. If no other task used it in the meantime, the hash of the original request stays, not one
-- of the stored spec: there 1e16 has become 10000000000000000.
INSERT INTO lineshaft.task_key AS known (key, task_id, content_hash)
SELECT key, task_id, content_hash
FROM unnest(%(keys)s::text[], %(task_ids)s::text[], %(hashes)s::bytea[]) AS wanted (key, task_id, content_hash)
ORDER BY key
ON CONFLICT (key) DO UPDATE
    SET task_id = excluded.task_id, expires_at = NULL,
        -- The window of another task isn't this one's.
        ttl_sec = CASE WHEN known.task_id = excluded.task_id THEN known.ttl_sec END,
        content_hash = CASE
            WHEN known.task_id <> excluded.task_id THEN excluded.content_hash
            WHEN position(excluded.content_hash IN known.content_hash) > 0 THEN known.content_hash
            -- A person changed the spec: both the original request and the present spec match the task.
            ELSE known.content_hash || excluded.content_hash
        END
    WHERE
        -- A completed task has kept it.
        known.task_id = excluded.task_id
        OR
        -- include: key_is_free
RETURNING key

-- name: upstream_of
-- What the tasks of a revival depend on. It is locked (upstream.sql) before the revival counts its edges: no upstream task may end, or be
-- revived, between the count and the commit.
SELECT DISTINCT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = ANY (%(ids)s::text[])

-- name: reopen_edges
-- A completed task may have been run again since a dependent of it ended: that dependent waits for it again when it is revived. Children of a
-- list that are revived together take turns again.
UPDATE lineshaft.edge
SET satisfied = false
WHERE edge.task_id = ANY (%(ids)s::text[]) AND edge.satisfied
  -- Not one that retention has deleted.
  AND EXISTS (SELECT FROM lineshaft.task WHERE task.id = edge.depends_on)
  -- (Not a join: see unblock_dependents.)
  AND (
    (
        SELECT upstream.status = 'COMPLETED' OR edge.kind = 'ended' FROM lineshaft.task_end AS upstream WHERE upstream.id = edge.depends_on
    ) IS NOT TRUE
    OR (
        edge.depends_on = ANY (%(ids)s::text[])
        AND
            -- include: is_turn
    )
  )

-- name: reopen_work
-- Work of a source counts against its max_open again.
UPDATE lineshaft.source_work AS work
SET is_open = true
WHERE NOT work.is_open
  AND work.id = ANY (%(ids)s::text[] || ARRAY(SELECT task.dag_id FROM lineshaft.task WHERE task.id = ANY (%(ids)s::text[])))

-- name: promote_retry
-- RETRYING → READY; counters are kept.
UPDATE lineshaft.task_live AS live
SET status = 'READY', due_at = NULL, ready_at = coalesce(live.ready_at, clock.now), generation = (SELECT last_value FROM lineshaft.generation_no),
    rank = lineshaft.rank(live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now)
FROM lineshaft.lane, (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = %(id)s::text AND live.status = 'RETRYING' AND lane.id = live.lane_id
RETURNING live.id, live.dag_id
