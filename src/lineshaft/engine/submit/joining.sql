-- name: read_parents
SELECT id, dag_id FROM lineshaft.task WHERE id = ANY (%(ids)s::text[])

-- name: without_row
SELECT wanted.id
FROM unnest(%(dag_ids)s::text[]) AS wanted (id)
WHERE NOT EXISTS (SELECT FROM lineshaft.dag WHERE dag.id = wanted.id)

-- name: standalone_tasks
-- The only task of each of these virtual DAGs.
SELECT id, dag_id FROM lineshaft.task WHERE dag_id = ANY (%(dag_ids)s::text[])

-- name: lock_ended
-- A person might just be reviving a dead letter, or deciding about it.
SELECT id, status::text AS status FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[]) ORDER BY id FOR UPDATE

-- name: count_joined
-- The status is checked again on the locked row: the last task may just have ended.
WITH locked AS MATERIALIZED (
    SELECT dag.id FROM lineshaft.dag WHERE dag.id = ANY (%(dag_ids)s::text[]) ORDER BY dag.id FOR NO KEY UPDATE
)
UPDATE lineshaft.dag
SET total = dag.total + joined.n
FROM unnest(%(dag_ids)s::text[], %(added)s::integer[]) AS joined (id, n)
WHERE dag.id = joined.id AND dag.status IN ('pending', 'running', 'failed') AND (SELECT count(*) FROM locked) >= 0
RETURNING dag.id

-- name: dag_status
SELECT status::text FROM lineshaft.dag WHERE id = %(id)s::text
