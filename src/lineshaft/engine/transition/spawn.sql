-- name: spawn_depth
-- How many tasks are above this one, by parents.
WITH RECURSIVE above AS (
    SELECT parent_id, 1 AS depth FROM lineshaft.task WHERE id = %(id)s::text
    UNION ALL
    SELECT task.parent_id, above.depth + 1 FROM above JOIN lineshaft.task ON task.id = above.parent_id WHERE above.depth < 1000
)
SELECT max(depth) FROM above

-- name: count_spawned
-- The DAG's row is locked from here on: of two spawns the second sees what the first has created.
UPDATE lineshaft.dag SET spawned = spawned + %(n)s::integer WHERE id = %(dag_id)s::text RETURNING spawned

-- name: children
SELECT id, status::text AS status, output FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])
UNION ALL
SELECT id, status::text, NULL FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[])
