-- name: insert_dag
INSERT INTO lineshaft.dag (id, title, idempotency_key, created_by, created_by_token, budget_ceiling_usd, total, created_at)
VALUES (
    %(id)s::text, %(title)s::text, %(key)s::text, %(created_by)s::text, %(created_by_token)s::text, %(ceiling)s::numeric, %(total)s::integer,
    coalesce(%(now)s::timestamptz, now())
)

-- name: give_dags_rows
-- The virtual DAG of a standalone task becomes a real one, with what the task has reserved and spent so far. The task may be a dead letter:
-- then its DAG has failed.
WITH made AS (
    INSERT INTO lineshaft.dag (
        id, title, created_by, created_by_token, status, total, dead_lettered, reserved_usd, spent_usd, created_at, ended_at, account
    )
    SELECT
        task.dag_id, task.title, task.created_by, task.created_by_token,
        CASE WHEN live.id IS NULL THEN 'failed' WHEN live.epoch > 0 THEN 'running' ELSE 'pending' END::lineshaft.dag_status,
        1, (live.id IS NULL)::integer,
        coalesce(live.reserved_usd, 0) + (SELECT coalesce(sum(gate_run.reserved_usd), 0) FROM lineshaft.gate_run WHERE gate_run.task_id = task.id),
        -- What an attempt spends above its reservation counts at once.
        coalesce(live.cost_usd + lineshaft.booked_1(live.attempt_cost_usd, live.reserved_usd, true), ended.cost_usd), task.created_at, ended.ended_at,
        coalesce(live.account, live.last_account, ended.account)
    FROM lineshaft.task
    LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
    LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
    WHERE task.id = ANY (%(ids)s::text[])
    RETURNING id
)
-- Its events so far were derived from those of the task, with single: true.
INSERT INTO lineshaft.event (at, kinds, dag_id, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{dag.changed}', made.id, '{"single": {"from": true, "to": false}}'
FROM made

-- name: mark_real_dags
UPDATE lineshaft.task_live AS live
SET dag_id = task.dag_id
FROM lineshaft.task
WHERE live.id = ANY (%(ids)s::text[]) AND task.id = live.id

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
