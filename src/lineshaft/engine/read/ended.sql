-- name: ended
-- Whether these have ended: open, ended as a task or as a DAG, or unknown. A standalone task's DAG has no row: it ends with its task.
SELECT wanted.id,
    CASE
        WHEN dag.id IS NOT NULL THEN CASE WHEN dag.status IN ('completed', 'failed', 'cancelled') THEN 'dag' ELSE 'open' END
        WHEN task.id IS NOT NULL THEN
            CASE WHEN (SELECT true FROM lineshaft.task_end WHERE task_end.id = task.id) THEN 'task' ELSE 'open' END
        WHEN member.id IS NOT NULL THEN
            CASE WHEN (SELECT true FROM lineshaft.task_end WHERE task_end.id = member.id) THEN 'dag' ELSE 'open' END
        ELSE 'unknown'
    END AS state
FROM unnest(%(ids)s::text[]) AS wanted (id)
LEFT JOIN lineshaft.dag ON dag.id = wanted.id
LEFT JOIN lineshaft.task ON task.id = wanted.id
LEFT JOIN LATERAL (
    SELECT task.id FROM lineshaft.task WHERE task.dag_id = wanted.id ORDER BY task.dag_id, task.id LIMIT 1
) AS member ON true
