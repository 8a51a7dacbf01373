-- Tasks that others come to wait for. Used by store/upstream.py, which sends them together. They also run in callers' own transactions.

-- name: lock_ended_upstream
-- Those that didn't end well. A person might just be reviving one, after which it could end before the new edge is there to be counted
-- down, or be cancelling it, without knowing of the new dependent.
SELECT id FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[]) AND status <> 'COMPLETED' ORDER BY id FOR KEY SHARE

-- name: lock_upstream
-- Those that are live. KEY SHARE holds back their end, but neither claims nor other submissions, until the new edges are committed. One
-- without a DAG is marked, so that its end looks for what waits; a claim passes over the row meanwhile, so it is told again that it is
-- there.
WITH held AS MATERIALIZED (
    SELECT id, dag_id, awaited FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[]) ORDER BY id FOR KEY SHARE
),
marked AS (
    UPDATE lineshaft.task_live AS live
    SET awaited = true
    FROM (SELECT id FROM held WHERE dag_id IS NULL AND NOT awaited ORDER BY id) AS unmarked
    WHERE live.id = unmarked.id
    RETURNING live.lane_id, live.status
),
told AS (
    SELECT pg_notify('lineshaft', '*') FROM marked WHERE status = 'READY' HAVING count(*) > 0
)
SELECT id, dag_id, (SELECT count(*) FROM told) AS notified FROM held

-- name: upstream_stands
-- How each has ended, all under one snapshot; NULL: it is live. One that doesn't exist is missing.
SELECT id, NULL::text AS status FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[])
UNION ALL
SELECT id, status::text FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])
