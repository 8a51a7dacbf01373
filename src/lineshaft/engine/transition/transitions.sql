-- name: batch_outputs
-- The output of a batch is made of its children's. Each child waits for the one before it, which gives their order; children of a list have
-- their position in it as an input.
SELECT child.parent_id, child.id, ended.output,
    CASE WHEN batch.for_each IS NOT NULL THEN (child.inputs->'index'->>'value')::integer END AS index,
    ARRAY(
        SELECT before.depends_on FROM lineshaft.edge AS before WHERE before.task_id = child.id AND batch.for_each IS NULL
    ) AS after
FROM lineshaft.edge
JOIN lineshaft.task AS batch ON batch.id = edge.task_id
-- OFFSET 0: one look-up for each child, whatever the planner thinks of the number of children.
CROSS JOIN LATERAL (SELECT id, parent_id, inputs FROM lineshaft.task WHERE task.id = edge.depends_on OFFSET 0) AS child
CROSS JOIN LATERAL (SELECT output FROM lineshaft.task_end WHERE task_end.id = child.id OFFSET 0) AS ended
WHERE edge.task_id = ANY (%(ids)s::text[]) AND child.parent_id = edge.task_id
