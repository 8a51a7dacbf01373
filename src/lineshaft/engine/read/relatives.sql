-- name: upstream
SELECT task.id, task.title, task.type, task.key, coalesce(live.status, ended.status)::text AS status
FROM (
    SELECT edge.depends_on AS id FROM lineshaft.edge WHERE edge.task_id = %(id)s::text ORDER BY edge.satisfied, edge.depends_on LIMIT %(most)s::integer
) AS found
JOIN lineshaft.task ON task.id = found.id
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
ORDER BY task.id

-- name: downstream
SELECT task.id, task.title, task.type, task.key, coalesce(live.status, ended.status)::text AS status
FROM (
    SELECT edge.task_id AS id FROM lineshaft.edge WHERE edge.depends_on = %(id)s::text ORDER BY edge.task_id LIMIT %(most)s::integer
) AS found
JOIN lineshaft.task ON task.id = found.id
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
ORDER BY task.id

-- name: children
SELECT task.id, task.title, task.type, task.key, coalesce(live.status, ended.status)::text AS status
FROM (
    SELECT child.id FROM lineshaft.task AS child WHERE child.parent_id = %(id)s::text ORDER BY child.id LIMIT %(most)s::integer
) AS found
JOIN lineshaft.task ON task.id = found.id
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
ORDER BY task.id

-- name: cancelled_with
-- Tasks that have not ended and would be cancelled with this one: see `subtree` of cancel. The recursion produces rows on demand, so LIMIT
-- bounds it.
WITH RECURSIVE member AS (
    SELECT %(id)s::text COLLATE "C" AS id
    UNION
    SELECT below.id
    FROM member
    CROSS JOIN LATERAL (
        SELECT task.id FROM lineshaft.task WHERE task.parent_id = member.id
        UNION ALL
        SELECT edge.task_id FROM lineshaft.edge
        WHERE edge.depends_on = member.id AND edge.kind = 'success' AND NOT edge.satisfied
          AND EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = member.id)
    ) AS below
)
SELECT count(*) FILTER (WHERE live.id IS NOT NULL AND bounded.id <> %(id)s::text) AS n
FROM (SELECT member.id FROM member LIMIT %(most)s::integer) AS bounded
LEFT JOIN lineshaft.task_live AS live ON live.id = bounded.id

-- name: recorded_steps
-- Data that is too long to be shown is left out.
SELECT name, epoch, recorded_at, cost_usd, size, CASE WHEN size <= %(most_bytes)s::integer THEN data END AS data
FROM (
    SELECT step.name, step.epoch, step.recorded_at, step.cost_usd, step.data, octet_length(step.data::text) AS size
    FROM lineshaft.step WHERE step.task_id = %(id)s::text ORDER BY step.recorded_at DESC, step.name DESC LIMIT %(most)s::integer
) AS newest
ORDER BY recorded_at, name

-- name: checkpoint
SELECT epoch, recorded_at, octet_length(data::text) AS size,
    CASE WHEN octet_length(data::text) <= %(most_bytes)s::integer THEN data END AS data
FROM lineshaft.checkpoint WHERE task_id = %(id)s::text
