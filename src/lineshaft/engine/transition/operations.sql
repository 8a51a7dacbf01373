-- What people and parents do to tasks: cancel, retry by hand, spawn, add dependencies, change priority, pause types. Used by store/operations.py.

-- name: doomed
-- Everything that goes down with some tasks, each with all that it hangs on: children, and with `cascade` whatever needs the success of a
-- task that goes down. What has ended already drags nothing along but its own children; with `letters` a dead letter counts as not ended:
-- a person gives it up, and what waits for it with it.
WITH RECURSIVE doomed AS (
    SELECT root.id COLLATE "C" AS id FROM unnest(%(ids)s::text[]) AS root (id)
    UNION
    SELECT below.id
    FROM doomed
    CROSS JOIN LATERAL (
        SELECT task.id FROM lineshaft.task WHERE task.parent_id = doomed.id
        UNION ALL
        SELECT edge.task_id FROM lineshaft.edge
        WHERE %(cascade)s::boolean AND edge.depends_on = doomed.id AND edge.kind = 'success' AND NOT edge.satisfied
          AND (
            EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = doomed.id)
            OR (
                %(letters)s::boolean
                AND EXISTS (SELECT FROM lineshaft.task_end AS ended WHERE ended.id = doomed.id AND ended.status = 'DEAD_LETTERED')
            )
          )
    ) AS below
)
SELECT doomed.id, task.parent_id,
    ARRAY(
        SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = doomed.id AND edge.kind = 'success' AND NOT edge.satisfied
    ) AS waits_for
FROM doomed
LEFT JOIN lineshaft.task ON task.id = doomed.id

-- name: members
-- The tasks of a DAG; of a virtual one, its only task.
SELECT id FROM lineshaft.task WHERE dag_id = %(dag_id)s::text

-- name: pause
INSERT INTO lineshaft.pause (type, since) VALUES (%(type)s::text, coalesce(%(now)s::timestamptz, now()))
ON CONFLICT (type) DO NOTHING

-- name: resume
-- What was spent before somebody said to go on doesn't stop everything again.
WITH forgotten AS (
    DELETE FROM lineshaft.spend_sample WHERE %(type)s::text = '*'
)
DELETE FROM lineshaft.pause WHERE type = %(type)s::text RETURNING type

-- name: wake_everybody
SELECT pg_notify('lineshaft', '*')

-- name: lock_edges
-- Edges between existing tasks are added one transaction at a time, so that two of them can't close a cycle together.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.edges', 0))

-- name: upstream_of
-- Everything that these tasks wait for, directly or not, as edges.
WITH RECURSIVE upstream AS (
    SELECT task_id, depends_on FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) AND NOT satisfied
    UNION
    SELECT edge.task_id, edge.depends_on
    FROM upstream JOIN lineshaft.edge ON edge.task_id = upstream.depends_on AND NOT edge.satisfied
)
SELECT task_id, depends_on FROM upstream

-- name: insert_waits
-- A parent that waits again for the same child waits anew.
INSERT INTO lineshaft.edge (task_id, depends_on, kind, satisfied)
SELECT %(parent)s::text, child.id, 'ended', child.ended
FROM unnest(%(ids)s::text[], %(ended)s::boolean[]) AS child (id, ended)
ON CONFLICT (task_id, depends_on) DO UPDATE SET satisfied = excluded.satisfied

-- name: existing_edges
SELECT depends_on FROM lineshaft.edge WHERE task_id = %(id)s::text

-- name: block_task
-- More to wait for: READY goes back to PENDING.
UPDATE lineshaft.task_live
SET blocked = blocked + %(n)s::integer,
    status = CASE WHEN blocked + %(n)s::integer > 0 THEN 'PENDING' ELSE status END::lineshaft.task_status,
    parked = CASE WHEN blocked + %(n)s::integer > 0 THEN NULL ELSE parked END
WHERE id = %(id)s::text AND status IN ('PENDING', 'READY')

-- name: read_revivable
-- What a revival needs to know: the lane of the task's own preferences, its key, and whether it is a batch.
SELECT task.id, ended.status::text AS status, task.type, task.required_capabilities, task.model_preferences,
    task.priority_boost_per_minute, task.max_cost_usd, task.idempotency_key, task.spec, task.is_batch, dag.id AS dag_id,
    -- Batches around it with the same lock, the outermost first.
    ARRAY(
        WITH RECURSIVE around AS (
            SELECT batch.id, batch.parent_id, batch.lock_key, 1 AS distance
            FROM lineshaft.task AS batch WHERE batch.id = task.parent_id AND batch.is_batch
            UNION ALL
            SELECT batch.id, batch.parent_id, batch.lock_key, around.distance + 1
            FROM around JOIN lineshaft.task AS batch ON batch.id = around.parent_id AND batch.is_batch
        )
        SELECT around.id FROM around WHERE around.lock_key = task.lock_key ORDER BY around.distance DESC
    ) AS lock_owners
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
WHERE ended.id = ANY (%(ids)s::text[])
ORDER BY ended.id
FOR UPDATE OF ended

-- name: retake_keys
-- A revived task wants its idempotency key back. If nobody had it since, what it was first asked with goes on counting, not what the
-- database made of that: 1e16 came back as 10000000000000000, and a reference by key as one by id.
INSERT INTO lineshaft.task_key AS known (key, task_id, content_hash)
SELECT key, task_id, content_hash
FROM unnest(%(keys)s::text[], %(task_ids)s::text[], %(hashes)s::bytea[]) AS wanted (key, task_id, content_hash)
ORDER BY key
ON CONFLICT (key) DO UPDATE
    SET task_id = excluded.task_id, expires_at = NULL,
        content_hash = CASE
            WHEN known.task_id <> excluded.task_id THEN excluded.content_hash
            WHEN position(excluded.content_hash IN known.content_hash) > 0 THEN known.content_hash
            -- A person changed the spec: both what was asked first and what it is now stand for the task.
            ELSE known.content_hash || excluded.content_hash
        END
    WHERE known.expires_at < coalesce(%(now)s::timestamptz, now())
RETURNING key

-- name: change_task
-- Priority, deadline and tags of a task that lock_tasks holds, and its turn with them. Gives what they were before.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
before AS MATERIALIZED (
    SELECT live.id, live.priority, live.deadline, task.tags,
        coalesce(%(priority)s::smallint, live.priority) AS new_priority,
        CASE WHEN %(keep_deadline)s::boolean THEN live.deadline ELSE %(deadline)s::timestamptz END AS new_deadline,
        coalesce(%(tags)s::text[], task.tags) AS new_tags
    FROM lineshaft.task_live AS live JOIN lineshaft.task ON task.id = live.id
    WHERE live.id = %(id)s::text
),
placed AS (
    UPDATE lineshaft.task_live AS live
    SET priority = before.new_priority,
        deadline = before.new_deadline,
        rank = lineshaft.rank(
            before.new_priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), before.new_deadline, clock.now
        ),
        -- A deadline that is past already is told by rekey_deadlines; unless it was, and is still the same.
        rekey_at = coalesce(
            lineshaft.rekey_at(before.new_deadline, clock.now),
            CASE WHEN before.new_deadline IS DISTINCT FROM before.deadline THEN before.new_deadline ELSE live.rekey_at END
        )
    FROM before, lineshaft.lane, clock
    WHERE live.id = before.id AND lane.id = live.lane_id
),
asked AS (
    UPDATE lineshaft.task
    SET priority = before.new_priority, deadline = before.new_deadline, tags = before.new_tags
    FROM before
    WHERE task.id = before.id
)
SELECT priority, deadline, tags FROM before

-- name: promote_retry
-- RETRYING → READY by hand, counters kept.
UPDATE lineshaft.task_live AS live
SET status = 'READY', due_at = NULL, ready_at = coalesce(live.ready_at, clock.now), generation = (SELECT last_value FROM lineshaft.generation_no),
    rank = lineshaft.rank(live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now)
FROM lineshaft.lane, (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = %(id)s::text AND live.status = 'RETRYING' AND lane.id = live.lane_id
RETURNING live.id, live.dag_id, live.lane_id

-- name: waited_for
-- What the tasks of a revival still wait for. It is held (upstream.sql) before the revival counts: no upstream may end, or be revived and
-- then end, between the count and the commit, or it would find nobody to count down.
SELECT DISTINCT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = ANY (%(ids)s::text[]) AND NOT edge.satisfied

-- name: cancel_dead_letters
-- DEAD_LETTERED → CANCELLED. Guarded by the row locks that lock_dead_letters holds.
UPDATE lineshaft.task_end AS ended
SET status = 'CANCELLED', ended_at = coalesce(%(now)s::timestamptz, now()), reason = input.reason, category = NULL
FROM unnest(%(ids)s::text[], %(reasons)s::text[]) AS input (id, reason)
WHERE ended.id = input.id AND ended.status = 'DEAD_LETTERED'
