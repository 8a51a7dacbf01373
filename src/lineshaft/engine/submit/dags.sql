-- name: insert_dag
INSERT INTO lineshaft.dag (id, title, idempotency_key, created_by, budget_ceiling_usd, total, created_at)
VALUES (
    %(id)s::text, %(title)s::text, %(key)s::text, %(created_by)s::text, %(ceiling)s::numeric, %(total)s::integer,
    coalesce(%(now)s::timestamptz, now())
)

-- name: start_dag
-- A virtual DAG that gets a row after its task was claimed.
UPDATE lineshaft.dag
SET status = 'running', reserved_usd = %(reserved)s::numeric, spent_usd = %(spent)s::numeric
WHERE id = %(id)s::text

-- name: join_dag
UPDATE lineshaft.task_live SET dag_id = %(dag_id)s::text WHERE id = %(id)s::text

-- name: log_dag_created
INSERT INTO lineshaft.event (at, kinds, dag_id)
VALUES (coalesce(%(now)s::timestamptz, now()), '{dag.created}', %(id)s::text)

-- name: insert_edges
INSERT INTO lineshaft.edge (task_id, depends_on, satisfied)
SELECT * FROM unnest(%(task_ids)s::text[], %(depends_on)s::text[], %(satisfied)s::boolean[])

-- name: take_dag_key
-- A cancelled DAG loses its key. (A DAG that this snapshot can't see was just created by another transaction.)
INSERT INTO lineshaft.dag_key AS known (key, dag_id, tasks)
VALUES (%(key)s::text, %(dag_id)s::text, %(tasks)s::jsonb)
ON CONFLICT (key) DO UPDATE
    SET dag_id = excluded.dag_id, tasks = excluded.tasks
    WHERE (SELECT dag.status = 'cancelled' FROM lineshaft.dag WHERE dag.id = known.dag_id)
RETURNING key

-- name: read_dag_key
-- As text: a caller's connection has its own idea of what JSON becomes.
SELECT dag_id, tasks::text AS tasks FROM lineshaft.dag_key WHERE key = %(key)s::text
