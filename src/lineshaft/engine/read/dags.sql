-- name: read_dags
SELECT id, title, status::text AS status, created_by, created_by_token, budget_ceiling_usd, reserved_usd, spent_usd, created_at, ended_at AS completed_at
FROM lineshaft.dag
WHERE id = ANY (%(ids)s::text[])

-- name: dag_members
SELECT task.dag_id, task.id, coalesce(live.status, ended.status)::text AS status, task.title, task.created_by, task.created_by_token, task.created_at,
    coalesce(live.epoch, ended.epoch) AS epoch, ended.ended_at,
    coalesce(live.cost_usd, ended.cost_usd) AS spent_usd, coalesce(live.reserved_usd, 0::numeric(20, 6)) AS reserved_usd
FROM lineshaft.task
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE task.dag_id = ANY (%(ids)s::text[])
ORDER BY task.dag_id, task.id

-- name: dag_edges
SELECT edge.task_id, edge.depends_on
FROM lineshaft.task
JOIN lineshaft.edge ON edge.task_id = task.id
WHERE task.dag_id = ANY (%(ids)s::text[])
ORDER BY edge.task_id, edge.depends_on
