-- Locks on tasks that get new dependents. These statements also run in callers' own transactions.

-- name: lock_ended_upstream
-- A person might just be reviving or rerunning one, so that it could end before the new edge exists, or be cancelling it, without knowing
-- about the new dependent.
SELECT id FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[]) ORDER BY id FOR KEY SHARE

-- name: lock_upstream
-- Live tasks. KEY SHARE blocks their end, but neither claims nor other submissions, until the new edges are committed. A task without a
-- DAG is marked, so that its end looks for dependents; a claim skips the row in the meantime, so waiters are notified again.
WITH held AS MATERIALIZED (SELECT id, dag_id, awaited FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[]) ORDER BY id FOR KEY SHARE),
marked AS (
    UPDATE lineshaft.task_live AS live
    SET awaited = true
    FROM (SELECT id FROM held WHERE dag_id IS NULL AND NOT awaited ORDER BY id) AS unmarked
    WHERE live.id = unmarked.id
    RETURNING live.lane_id, live.status
),
woken AS (SELECT pg_notify(lineshaft.channel(), '*') FROM marked WHERE status = 'READY' HAVING count(*) > 0)
SELECT id FROM held WHERE (SELECT count(*) FROM woken) >= 0

-- name: read_upstream
-- How each has ended, all under one snapshot; NULL: it is live. An unknown task is missing.
SELECT id, NULL::text AS status FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[])
UNION ALL
SELECT id, status::text FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])
