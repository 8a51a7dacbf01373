-- If a filter leaves few tasks, statements named ids_… collect them all, at most `most`, and keys_among or keys_by_priority sort them.
-- Otherwise keys_by_age walks through all tasks, newest first, at most `scan` rows at a time.

-- fragment: task_filters
(%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
AND (%(created_by)s::text[] IS NULL OR task.created_by = ANY (%(created_by)s::text[]))
AND (%(patterns)s::text[] IS NULL OR task.title ILIKE ANY (%(patterns)s::text[]))
AND (%(tags)s::text[] IS NULL OR task.tags && %(tags)s::text[])
AND (%(dag_ids)s::text[] IS NULL OR task.dag_id = ANY (%(dag_ids)s::text[]))
AND (%(parent_ids)s::text[] IS NULL OR task.parent_id = ANY (%(parent_ids)s::text[]))
AND (%(lock_keys)s::text[] IS NULL OR task.lock_key = ANY (%(lock_keys)s::text[]))
AND (%(batches)s::boolean IS NULL OR task.is_batch)

-- fragment: status_filters
(%(priority_from)s::integer IS NULL OR coalesce(live.priority, task.priority) >= %(priority_from)s::integer)
AND (%(priority_to)s::integer IS NULL OR coalesce(live.priority, task.priority) <= %(priority_to)s::integer)
AND (%(any_status)s::boolean
     OR (%(live)s::text[] IS NOT NULL AND live.status = ANY (%(live)s::text[]::lineshaft.task_status[]))
     OR (%(ended)s::text[] IS NOT NULL AND ended.status = ANY (%(ended)s::text[]::lineshaft.task_status[])))
AND (%(agent_ids)s::text[] IS NULL OR coalesce(live.agent_id, ended.agent_id) = ANY (%(agent_ids)s::text[]))

-- name: plan_to_walk
-- For lists that walk from the newest task on and stop when the page is full: never collect and sort all candidates.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true)

-- name: plan_to_scan
-- For the one list that reads a whole table: with a forbidden scan in the plan, the costs of joins no longer matter to the planner.
SELECT set_config('enable_seqscan', 'on', true)

-- name: ids_of_parents
SELECT ARRAY(SELECT id FROM lineshaft.task WHERE parent_id = ANY (%(parent_ids)s::text[]) LIMIT %(most)s::integer) AS ids

-- name: ids_of_dags
SELECT ARRAY(SELECT id FROM lineshaft.task WHERE dag_id = ANY (%(dag_ids)s::text[]) LIMIT %(most)s::integer) AS ids

-- name: ids_of_documents
SELECT ARRAY(SELECT id FROM lineshaft.task WHERE lock_key = ANY (%(lock_keys)s::text[]) LIMIT %(most)s::integer) AS ids

-- name: ids_tagged
SELECT ARRAY(SELECT id FROM lineshaft.task WHERE tags && %(tags)s::text[] AND tags <> '{}' LIMIT %(most)s::integer) AS ids

-- name: ids_held
-- By the index of leases.
SELECT ARRAY(
    SELECT id FROM lineshaft.task_live
    WHERE lease_until IS NOT NULL AND (%(agent_ids)s::text[] IS NULL OR agent_id = ANY (%(agent_ids)s::text[]))
    LIMIT %(most)s::integer
) AS ids

-- name: ids_retrying
SELECT ARRAY(
    SELECT id FROM lineshaft.task_live
    WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL AND status = 'RETRYING'
    LIMIT %(most)s::integer
) AS ids

-- name: ids_live
SELECT ARRAY(
    SELECT id FROM lineshaft.task_live
    WHERE status = ANY (%(live)s::text[]::lineshaft.task_status[]) AND (%(batches)s::boolean IS NULL OR is_batch)
    LIMIT %(most)s::integer
) AS ids

-- name: ids_ended_badly
SELECT ARRAY(
    SELECT id FROM lineshaft.task_end
    WHERE status <> 'COMPLETED' AND status = ANY (%(ended)s::text[]::lineshaft.task_status[])
    LIMIT %(most)s::integer
) AS ids

-- name: ids_completed
SELECT ARRAY(SELECT id FROM lineshaft.task_end WHERE status = 'COMPLETED' LIMIT %(most)s::integer) AS ids

-- name: keys_by_age
-- Newest first, by task_by_age. The last row that was read is returned too, matching or not: the list continues after it.
SELECT created_at, id, coalesce(matches, false) AS matches, n = %(scan)s::integer AS is_last
FROM (
    SELECT candidate.*, row_number() OVER (ORDER BY created_at DESC, id DESC) AS n
    FROM (
        SELECT task.created_at, task.id,
            -- include: task_filters
            AND
            -- include: status_filters
            AS matches
        FROM lineshaft.task
        LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
        LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
        WHERE (task.created_at, task.id)
            < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
        ORDER BY task.created_at DESC, task.id DESC
        LIMIT %(scan)s::integer
    ) AS candidate
) AS numbered
WHERE matches OR n = %(scan)s::integer
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s::integer

-- name: keys_among
-- The same for a few tasks, collected first and then sorted: otherwise the planner would walk.
WITH few AS MATERIALIZED (
    SELECT created_at, id, dag_id, parent_id, type, title, tags, created_by, lock_key, is_batch, priority
    FROM lineshaft.task WHERE id = ANY (%(ids)s::text[])
)
SELECT task.created_at, task.id, true AS matches, false AS is_last
FROM few AS task
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE (task.created_at, task.id) < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
  AND
  -- include: task_filters
  AND
  -- include: status_filters
ORDER BY task.created_at DESC, task.id DESC
LIMIT %(limit)s::integer

-- name: keys_by_priority
-- Live tasks by rank, as of the first page; ids NULL: all. A task that was never READY has no age. Ranks are compared to a millionth, as in
-- claims; equal ones are in the order of submission.
WITH lane AS MATERIALIZED (
    SELECT id, type, boost_per_minute * lineshaft.minutes(%(as_of)s::timestamptz) AS aged FROM lineshaft.lane ORDER BY id
),
live AS (
    SELECT live.id, live.submission_no, live.priority, round(1e6 * CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, %(as_of)s::timestamptz, live.deadline, %(as_of)s::timestamptz)
    END) AS effective
    FROM lineshaft.task_live AS live
    JOIN lane ON lane.id = live.lane_id
    WHERE (%(ids)s::text[] IS NULL OR live.id = ANY (%(ids)s::text[]))
      AND live.status = ANY (%(live)s::text[]::lineshaft.task_status[])
      AND (%(agent_ids)s::text[] IS NULL OR live.agent_id = ANY (%(agent_ids)s::text[]))
      AND (%(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[]))
)
SELECT live.effective, live.submission_no, live.id
FROM live
LEFT JOIN lineshaft.task ON task.id = live.id
WHERE (live.effective, live.submission_no) > (
        coalesce(%(after_effective)s::double precision, '-infinity'), coalesce(%(after_no)s::bigint, 0)
    )
  AND
  -- include: task_filters
  AND (%(priority_from)s::integer IS NULL OR live.priority >= %(priority_from)s::integer)
  AND (%(priority_to)s::integer IS NULL OR live.priority <= %(priority_to)s::integer)
ORDER BY live.effective, live.submission_no
LIMIT %(limit)s::integer

-- name: keys_of_ready
-- READY tasks of some types or all, by rank: the heads of each lane by task_live_claimable, and parked tasks by their indexes.
WITH RECURSIVE clock AS MATERIALIZED (SELECT '-infinity'::timestamptz AS now),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation),
waiting AS (
    -- include: waiting_lanes
),
wanted AS MATERIALIZED (
    SELECT waiting.generation, waiting.lane_id, lane.boost_per_minute * lineshaft.minutes(%(as_of)s::timestamptz) AS aged
    FROM waiting
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.lane_id OFFSET 0) AS lane
    WHERE %(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[])
),
after AS MATERIALIZED (
    SELECT coalesce(%(after_effective)s::double precision, '-infinity') AS effective, coalesce(%(after_no)s::bigint, 0) AS no
)
SELECT effective, submission_no, id
FROM (
    SELECT round((next.rank - wanted.aged) * 1e6) AS effective, next.submission_no, next.id
    FROM wanted
    CROSS JOIN after
    CROSS JOIN LATERAL (
        SELECT id, rank, submission_no
        FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = wanted.generation AND lane_id = wanted.lane_id
          -- For the index, with room for rounding; then exactly.
          AND rank >= (after.effective - 1) / 1e6 + wanted.aged
          AND (round((rank - wanted.aged) * 1e6), submission_no) > (after.effective, after.no)
        ORDER BY rank, submission_no
        -- Room for ranks that differ by less than a millionth, which have another order here.
        LIMIT 2 * %(limit)s::integer
        OFFSET 0
    ) AS next
    UNION ALL
    SELECT parked.effective, parked.submission_no, parked.id
    FROM (
        SELECT round((live.rank - lane.boost_per_minute * lineshaft.minutes(%(as_of)s::timestamptz)) * 1e6) AS effective,
            live.submission_no, live.id
        FROM (
            SELECT id, lane_id, rank, submission_no FROM lineshaft.task_live
            WHERE status = 'READY' AND lock_key IS NOT NULL AND parked = 'lock'
            UNION ALL
            SELECT id, lane_id, rank, submission_no FROM lineshaft.task_live WHERE parked = 'dag_budget'
            UNION ALL
            SELECT id, lane_id, rank, submission_no FROM lineshaft.task_live WHERE status = 'READY' AND parked = 'fair' AND parked_key IS NULL
            UNION ALL
            SELECT id, lane_id, rank, submission_no FROM lineshaft.task_live WHERE parked_key IS NOT NULL
        ) AS live
        CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = live.lane_id OFFSET 0) AS lane
        WHERE %(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[])
    ) AS parked
    CROSS JOIN after
    WHERE (parked.effective, parked.submission_no) > (after.effective, after.no)
) AS found
ORDER BY effective, submission_no
LIMIT %(limit)s::integer

-- name: read_now
SELECT coalesce(%(now)s::timestamptz, now()) AS now

-- name: dag_keys_by_age
-- Newest first, as keys_by_age. A virtual DAG has no row: it is derived from its task.
SELECT created_at, id, dag_id, coalesce(matches, false) AS matches, n = %(scan)s::integer AS is_last
FROM (
    SELECT candidate.*, row_number() OVER (ORDER BY created_at DESC, id DESC) AS n
    FROM (
        (
            SELECT dag.created_at, dag.id, dag.id AS dag_id,
                (%(statuses)s::text[] IS NULL OR dag.status::text = ANY (%(statuses)s::text[]))
                AND (%(created_by)s::text[] IS NULL OR dag.created_by = ANY (%(created_by)s::text[]))
                AND (%(patterns)s::text[] IS NULL OR dag.title ILIKE ANY (%(patterns)s::text[])) AS matches
            FROM lineshaft.dag
            WHERE (dag.created_at, dag.id)
                < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
            ORDER BY dag.created_at DESC, dag.id DESC
            LIMIT %(scan)s::integer
        )
        UNION ALL
        (
            SELECT task.created_at, task.id, task.dag_id,
                NOT EXISTS (SELECT FROM lineshaft.dag WHERE dag.id = task.dag_id)
                AND (%(statuses)s::text[] IS NULL OR CASE
                    WHEN ended.status = 'COMPLETED' THEN 'completed'
                    WHEN ended.status = 'CANCELLED' THEN 'cancelled'
                    WHEN ended.status = 'DEAD_LETTERED' THEN 'failed'
                    WHEN live.epoch > 0 THEN 'running'
                    ELSE 'pending'
                END = ANY (%(statuses)s::text[]))
                AND (%(created_by)s::text[] IS NULL OR task.created_by = ANY (%(created_by)s::text[]))
                AND (%(patterns)s::text[] IS NULL OR task.title ILIKE ANY (%(patterns)s::text[])) AS matches
            FROM lineshaft.task
            LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
            LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
            WHERE %(virtual)s::boolean
              AND (task.created_at, task.id)
                < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
            ORDER BY task.created_at DESC, task.id DESC
            LIMIT %(scan)s::integer
        )
        ORDER BY created_at DESC, id DESC
        LIMIT %(scan)s::integer
    ) AS candidate
) AS numbered
WHERE matches OR n = %(scan)s::integer
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s::integer
