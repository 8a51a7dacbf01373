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
-- A parent that waits for the same child a second time waits again.
INSERT INTO lineshaft.edge (task_id, depends_on, kind, satisfied)
SELECT %(parent)s::text, child.id, 'ended', child.ended
FROM unnest(%(ids)s::text[], %(ended)s::boolean[]) AS child (id, ended)
ON CONFLICT (task_id, depends_on) DO UPDATE SET satisfied = excluded.satisfied

-- name: block_task
-- More dependencies: READY becomes PENDING.
UPDATE lineshaft.task_live
SET blocked = blocked + %(n)s::integer,
    status = CASE WHEN blocked + %(n)s::integer > 0 THEN 'PENDING' ELSE status END::lineshaft.task_status,
    parked = CASE WHEN blocked + %(n)s::integer > 0 THEN CASE WHEN admission ? 'fair' THEN 'fair' END ELSE parked END,
    parked_key = CASE WHEN blocked + %(n)s::integer > 0 THEN NULL ELSE parked_key END
WHERE id = %(id)s::text AND status IN ('PENDING', 'READY')

-- name: insert_dependencies
-- Edges that exist already stay as they are. Returns the new ones, and whether each is satisfied.
INSERT INTO lineshaft.edge (task_id, depends_on, kind, satisfied)
SELECT %(id)s::text, input.depends_on, 'success', input.satisfied
FROM unnest(%(depends_on)s::text[], %(satisfied)s::boolean[]) AS input (depends_on, satisfied)
ON CONFLICT (task_id, depends_on) DO NOTHING
RETURNING depends_on, satisfied

-- name: rekey_paths
-- The critical path below these tasks has changed, and so has that of their upstream tasks. Ten levels each way are enough: the boost
-- stops at ten. A row that another transaction has locked stays as it is: its rank may be off by a point or so.
WITH RECURSIVE above AS (
    SELECT id COLLATE "C", 0 AS height FROM unnest(%(ids)s::text[]) AS changed (id)
    UNION
    SELECT edge.depends_on, above.height + 1
    FROM above JOIN lineshaft.edge ON edge.task_id = above.id AND NOT edge.satisfied
    WHERE above.height <= 10
),
below AS (
    SELECT live.id AS origin, live.id, 0 AS depth
    FROM lineshaft.task_live AS live WHERE live.id = ANY (ARRAY(SELECT DISTINCT id FROM above))
    UNION
    SELECT below.origin, live.id, below.depth + 1
    FROM below
    JOIN lineshaft.edge ON edge.depends_on = below.id AND NOT edge.satisfied
    JOIN lineshaft.task_live AS live ON live.id = edge.task_id
    WHERE below.depth < 10
),
length AS MATERIALIZED (SELECT origin AS id, max(depth)::smallint AS n FROM below GROUP BY origin),
free AS MATERIALIZED (
    SELECT live.id, length.n
    FROM length JOIN lineshaft.task_live AS live ON live.id = length.id
    WHERE least(live.downstream, 10) <> length.n
    ORDER BY live.id
    FOR UPDATE OF live SKIP LOCKED
)
UPDATE lineshaft.task_live AS live
SET downstream = free.n,
    parked_key = CASE WHEN live.parked = 'fair' THEN NULL ELSE live.parked_key END,
    rank = lineshaft.rank(
        live.priority, free.n, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
    ),
    -- A missed deadline is left to rekey_deadlines, which logs it.
    rekey_at = coalesce(lineshaft.rekey_at(live.deadline, clock.now), live.rekey_at)
FROM free, lineshaft.lane, (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = free.id AND lane.id = live.lane_id
