-- Running completed tasks again.

ALTER TABLE lineshaft.dag ADD COLUMN rerun_after bigint;
COMMENT ON COLUMN lineshaft.dag.rerun_after IS 'The number of the last event before a completed task was run again; null: none was.';

-- Whether a DAG completed after one of its tasks had been run again: `seq` is the number of its event. A standalone task has no DAG with a
-- row; it was run again if an earlier claim of it completed. Read, not written with the event: completions are the hot path.
CREATE FUNCTION lineshaft.is_rerun_1(task_id text, dag_id text, epoch integer, seq bigint) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE
    WHEN dag_id IS NOT NULL THEN coalesce((SELECT dag.rerun_after < is_rerun_1.seq FROM lineshaft.dag WHERE dag.id = is_rerun_1.dag_id), false)
    ELSE EXISTS (
        SELECT FROM lineshaft.attempt
        WHERE attempt.task_id = is_rerun_1.task_id AND attempt.epoch < is_rerun_1.epoch AND attempt.outcome = 'completed'
    )
END;

CREATE OR REPLACE VIEW lineshaft.events AS
SELECT event.seq, kind.n, kind.kind, event.at, event.task_id,
    -- Those of a standalone task are written without its DAG, which has no row.
    coalesce(event.dag_id, (SELECT task.dag_id FROM lineshaft.task WHERE task.id = event.task_id)) AS dag_id,
    event.agent_id, event.epoch,
    CASE
        WHEN kind.kind = 'dag.completed' AND lineshaft.is_rerun_1(event.task_id, event.dag_id, event.epoch, event.seq)
        THEN coalesce(event.data, '{}') || '{"rerun": true}' ELSE event.data
    END AS data
FROM lineshaft.event
CROSS JOIN LATERAL unnest(event.kinds) WITH ORDINALITY AS kind (kind, n)
UNION ALL
SELECT event.seq, cardinality(event.kinds) + 1, dag.kind, event.at, NULL,
    (SELECT task.dag_id FROM lineshaft.task WHERE task.id = event.task_id),
    CASE WHEN dag.kind = 'dag.running' THEN event.agent_id END, NULL,
    CASE
        WHEN dag.kind = 'dag.completed' AND event.epoch > 1 AND lineshaft.is_rerun_1(event.task_id, event.dag_id, event.epoch, event.seq)
        THEN '{"single": true, "rerun": true}'::jsonb ELSE '{"single": true}'
    END
FROM lineshaft.event
CROSS JOIN LATERAL (SELECT lineshaft.dag_kind(event.kinds, event.epoch) AS kind) AS dag
WHERE event.dag_id IS NULL AND dag.kind IS NOT NULL;

-- Raises the critical paths of tasks above new ones: `p_lengths` are those below `p_ids`. Returns the lanes of READY tasks that it moved. Only
-- what grows is read, so a task with many dependents costs no more than one with few; the boost stops at ten. A row that another transaction
-- has locked stays as it is: its rank may be off by a point or so. It has the rights of its owner: roles that may only submit can't change
-- tasks in any other way.
CREATE FUNCTION lineshaft.raise_paths_1(p_ids text[], p_lengths smallint[], p_now timestamptz) RETURNS SETOF integer
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH RECURSIVE raised AS (
    SELECT live.id, input.n
    FROM unnest(p_ids, p_lengths) AS input (id, n)
    JOIN lineshaft.task_live AS live ON live.id = input.id
    WHERE live.downstream < least(input.n, 10)
    UNION
    SELECT above.id, above.n
    FROM raised
    CROSS JOIN LATERAL (
        SELECT live.id, (raised.n + 1)::smallint AS n
        FROM lineshaft.edge
        JOIN lineshaft.task_live AS live ON live.id = edge.depends_on
        WHERE edge.task_id = raised.id AND NOT edge.satisfied AND live.downstream < least(raised.n + 1, 10)
        OFFSET 0
    ) AS above
),
length AS MATERIALIZED (SELECT id, max(n) AS n FROM raised GROUP BY id),
free AS MATERIALIZED (
    SELECT live.id, length.n
    FROM length JOIN lineshaft.task_live AS live ON live.id = length.id
    ORDER BY live.id
    FOR NO KEY UPDATE OF live SKIP LOCKED
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET downstream = free.n,
        rank = lineshaft.rank(live.priority, free.n, lane.boost_per_minute, coalesce(live.ready_at, p_now), live.deadline, p_now),
        rekey_at = coalesce(lineshaft.rekey_at(live.deadline, p_now), live.rekey_at)
    FROM free, lineshaft.lane
    WHERE live.id = free.id AND lane.id = live.lane_id AND live.downstream < free.n
    RETURNING live.lane_id, live.status
)
SELECT lane_id FROM moved WHERE status = 'READY'
$$;
