-- name: unpark_lock_waiters
-- The best waiter of each lane can be claimed again, and the readers behind it. Under a snapshot that is newer than the release, so that a
-- task which was parked while the release waited isn't missed. While readers have the lock, others may join them unless a writer waits.
WITH RECURSIVE waiting AS MATERIALIZED (
    SELECT free.key, first.lane_id, first.id, first.reads
    FROM unnest(%(keys)s::text[]) AS free (key)
    CROSS JOIN LATERAL (
        SELECT lane_id, id, admission -> 'locks' ->> lock_key = 'true' AS reads FROM lineshaft.task_live
        WHERE status = 'READY' AND lock_key = free.key AND parked = 'lock'
        ORDER BY lane_id, rank, submission_no
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT waiting.key, next.lane_id, next.id, next.reads
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT lane_id, id, admission -> 'locks' ->> lock_key = 'true' AS reads FROM lineshaft.task_live
        WHERE status = 'READY' AND lock_key = waiting.key AND lane_id > waiting.lane_id AND parked = 'lock'
        ORDER BY lane_id, rank, submission_no
        LIMIT 1
    ) AS next
),
-- Readers run together: up to a hundred of each lane, and up to the first writer.
readers AS (
    SELECT reader.id
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT id, bool_or(is_writer) OVER (ORDER BY rank, submission_no) AS is_behind
        FROM (
            SELECT id, rank, submission_no, (admission -> 'locks' ->> lock_key) IS DISTINCT FROM 'true' AS is_writer
            FROM lineshaft.task_live
            WHERE status = 'READY' AND lock_key = waiting.key AND lane_id = waiting.lane_id AND parked = 'lock'
            ORDER BY rank, submission_no
            LIMIT 100
        ) AS first
    ) AS reader
    WHERE waiting.reads AND NOT reader.is_behind
),
-- Sorted: of two that unpark the same tasks, one waits for the other.
locked AS MATERIALIZED (
    SELECT wanted.id
    FROM lineshaft.task_live AS wanted
    WHERE wanted.id = ANY (ARRAY(SELECT id FROM waiting UNION SELECT id FROM readers)) AND wanted.parked = 'lock'
      AND NOT
      -- include: lock_closed
    ORDER BY wanted.id
    FOR NO KEY UPDATE
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET parked = CASE WHEN live.admission ? 'fair' THEN 'fair' END, generation = (SELECT last_value FROM lineshaft.generation_no)
    WHERE live.id = ANY (ARRAY(SELECT id FROM locked)) AND live.parked = 'lock'
    RETURNING live.lane_id
)
SELECT
    -- include: notify_lanes
FROM moved HAVING count(*) > 0

-- name: unpark_budget_waiters
-- READY tasks of DAGs that have money again, best first while the sum fits.
WITH fitting AS MATERIALIZED (
    SELECT waiting.id
    FROM (
        SELECT live.id, dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd AS money,
            sum(lineshaft.reservation_2(live.limit_usd, limits.default_max_cost_usd))
                OVER (PARTITION BY live.dag_id ORDER BY live.rank, live.submission_no) AS needed
        FROM lineshaft.dag
        CROSS JOIN LATERAL (
            SELECT id, dag_id, rank, submission_no, lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd
            FROM lineshaft.task_live
            WHERE parked = 'dag_budget' AND task_live.dag_id = dag.id
            OFFSET 0
        ) AS live
        CROSS JOIN lineshaft.limits
        WHERE dag.id = ANY (%(dag_ids)s::text[])
          -- A task that is still too expensive blocks no others.
          AND lineshaft.affords_1(
            dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd, live.limit_usd, limits.default_max_cost_usd
          )
    ) AS waiting
    WHERE waiting.money IS NULL OR waiting.needed <= waiting.money
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET parked = CASE WHEN live.admission ? 'fair' THEN 'fair' END, budget_reported = false, generation = (SELECT last_value FROM lineshaft.generation_no)
    WHERE live.id = ANY (ARRAY(SELECT id FROM fitting))
      -- Written so that no index matches: the row must be found by its id.
      AND live.parked || '' = 'dag_budget'
    RETURNING live.lane_id
)
SELECT
    -- include: notify_lanes
FROM moved HAVING count(*) > 0

-- name: look_at_quotas
SELECT lineshaft.look_at_quotas_1(%(names)s::text[], %(ids)s::text[], false, coalesce(%(now)s::timestamptz, now()))

-- name: quota_names
SELECT DISTINCT lineshaft.quota_name_1(limiting.quota, limiting.key)
FROM lineshaft.task
CROSS JOIN LATERAL lineshaft.quotas_of_1(lineshaft.parking_keys_1(task.admission, task.tags)) AS limiting
WHERE (SELECT quota_kinds & 48 <> 0 FROM lineshaft.limits) AND task.id = ANY (%(ids)s::text[])
