-- name: read_dags
SELECT id, title, status::text AS status, created_by, created_by_token, budget_ceiling_usd, reserved_usd, spent_usd, created_at, ended_at AS completed_at
FROM lineshaft.dag
WHERE id = ANY (%(ids)s::text[])

-- name: dag_members
SELECT task.dag_id, task.id, task.parent_id, task.for_each IS NOT NULL AS has_list, coalesce(live.status, ended.status)::text AS status, task.title, task.created_by, task.created_by_token, task.created_at,
    coalesce(live.epoch, ended.epoch) AS epoch, ended.ended_at,
    coalesce(live.cost_usd, ended.cost_usd) AS spent_usd, coalesce(live.reserved_usd, 0::numeric(20, 6)) AS reserved_usd
FROM lineshaft.task
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE task.dag_id = ANY (%(ids)s::text[])
ORDER BY task.dag_id, task.id

-- name: dag_tasks
-- The tasks of a DAG, without the children of lists that aren't in `opened`: there may be thousands.
SELECT ARRAY(
    SELECT task.id
    FROM lineshaft.task
    WHERE task.dag_id = %(id)s::text AND (
        task.parent_id = ANY (%(opened)s::text[])
        OR NOT EXISTS (SELECT FROM lineshaft.task AS batch WHERE batch.id = task.parent_id AND batch.for_each IS NOT NULL)
    )
    ORDER BY task.id
    LIMIT %(most)s::integer
) AS ids

-- name: list_items
-- The children of lists by state, without those of lists that were replaced.
SELECT batch.id, child.status::text AS status, count(*)::integer AS n, sum(child.cost_usd) AS cost_usd
FROM lineshaft.task AS batch
JOIN lineshaft.edge ON edge.task_id = batch.id
-- OFFSET 0: one look-up by id for each child, whatever the planner thinks of their number.
CROSS JOIN LATERAL (
    SELECT task.parent_id, coalesce(live.status, ended.status) AS status,
        coalesce(live.cost_usd + live.attempt_cost_usd, ended.cost_usd) AS cost_usd
    FROM lineshaft.task
    LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
    LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
    WHERE task.id = edge.depends_on
    OFFSET 0
) AS child
WHERE batch.dag_id = %(id)s::text AND batch.for_each IS NOT NULL AND child.parent_id = batch.id
GROUP BY batch.id, child.status

-- name: dag_edges
SELECT edge.task_id, edge.depends_on
FROM lineshaft.task
JOIN lineshaft.edge ON edge.task_id = task.id
WHERE task.dag_id = ANY (%(ids)s::text[])
ORDER BY edge.task_id, edge.depends_on
