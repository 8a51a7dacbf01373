-- name: members
-- A task that is to run again, and what waits for it: with `downstream` everything below it, else only what hasn't ended. A batch has no work
-- of its own, so its children run again; of a task with a list, those of its present list. Nothing is locked here: the caller locks these and
-- looks again, until there are no others.
WITH RECURSIVE root AS (
    SELECT %(id)s::text COLLATE "C" AS id
    UNION
    SELECT child.id
    FROM root
    CROSS JOIN LATERAL (
        SELECT child.id FROM lineshaft.task AS batch JOIN lineshaft.task AS child ON child.parent_id = batch.id
        WHERE batch.id = root.id AND batch.is_batch
          AND (
            batch.for_each IS NULL
            OR EXISTS (SELECT FROM lineshaft.edge WHERE edge.task_id = batch.id AND edge.depends_on = child.id)
          )
        OFFSET 0
    ) AS child
),
below AS (
    SELECT id FROM root
    UNION
    SELECT dependent.id
    FROM below
    CROSS JOIN LATERAL (
        SELECT edge.task_id AS id FROM lineshaft.edge
        WHERE edge.depends_on = below.id AND %(downstream)s::boolean
          AND (
            -- include: is_turn
          ) IS NOT TRUE
        OFFSET 0
    ) AS dependent
),
member AS MATERIALIZED (
    SELECT id FROM below
    UNION
    SELECT live.id
    FROM root
    CROSS JOIN LATERAL (
        SELECT edge.task_id FROM lineshaft.edge
        WHERE edge.depends_on = root.id
          AND (
            -- include: is_turn
          ) IS NOT TRUE
        OFFSET 0
    ) AS dependent
    JOIN lineshaft.task_live AS live ON live.id = dependent.task_id
),
-- Their children are of a list that is replaced.
outdated AS MATERIALIZED (
    SELECT member.id
    FROM member
    JOIN lineshaft.task AS batch ON batch.id = member.id AND batch.for_each IS NOT NULL
    CROSS JOIN LATERAL (
        SELECT bool_or(upstream.parent_id IS NOT DISTINCT FROM batch.id) AS has_children,
            bool_or(upstream.parent_id IS DISTINCT FROM batch.id AND edge.depends_on = ANY (ARRAY(SELECT other.id FROM member AS other))) AS is_stale
        FROM lineshaft.edge
        -- OFFSET 0: one look-up for each, whatever the planner thinks of their number.
        CROSS JOIN LATERAL (SELECT parent_id FROM lineshaft.task WHERE task.id = edge.depends_on OFFSET 0) AS upstream
        WHERE edge.task_id = batch.id
    ) AS list
    WHERE list.has_children AND list.is_stale
)
SELECT member.id,
    member.id IN (SELECT outdated.id FROM outdated) AS has_old_list,
    -- It has begun with the outputs of others, and waits for its own children, sleeps, or waits for a signal.
    coalesce(live.status = 'PENDING' AND NOT live.is_batch, false)
        AND (
            EXISTS (SELECT FROM lineshaft.edge WHERE edge.task_id = member.id AND edge.kind = 'ended' AND NOT edge.satisfied)
            OR EXISTS (SELECT FROM lineshaft.wait WHERE wait.task_id = member.id AND wait.epoch = live.epoch)
        )
        AND EXISTS (
            SELECT FROM lineshaft.edge
            WHERE edge.task_id = member.id AND edge.kind = 'success' AND edge.depends_on = ANY (ARRAY(SELECT other.id FROM member AS other))
        ) AS is_suspended
FROM member
LEFT JOIN lineshaft.task_live AS live ON live.id = member.id

-- name: forget_lists
-- Tasks with a list that is replaced no longer wait for its children, which remain in the history. Returns the children.
DELETE FROM lineshaft.edge
WHERE edge.task_id = ANY (%(ids)s::text[])
  -- (Not a join: see unblock_dependents.)
  AND (SELECT child.parent_id FROM lineshaft.task AS child WHERE child.id = edge.depends_on) = edge.task_id
RETURNING edge.depends_on

-- name: keep_attempts
-- The attempts that completed tasks are in the rows of their ends, which a rerun deletes. (One whose output a gate checked has its own row, but
-- not the output.) Cost and tokens are the task's, without corrections, minus those of other attempts.
INSERT INTO lineshaft.attempt (
    task_id, epoch, number, revival, agent_id, incarnation, instance, model, version, account, claimed_at, started_at, ended_at, outcome, cost_usd,
    tokens_input, tokens_output, output
)
SELECT ended.id, ended.epoch, ended.attempts + 1, ended.revivals, ended.agent_id, ended.incarnation,
    (SELECT name FROM lineshaft.instance WHERE agent_id = ended.agent_id AND incarnation = ended.incarnation), ended.model, ended.version,
    ended.account, ended.claimed_at, ended.started_at, ended.ended_at, 'completed',
    greatest(ended.cost_usd - lineshaft.corrected_1(ended.id) - earlier.cost_usd, 0),
    greatest(ended.tokens_input - earlier.tokens_input, 0), greatest(ended.tokens_output - earlier.tokens_output, 0),
    jsonb_strip_nulls(jsonb_build_object('type', ended.output_type))
        || jsonb_build_object('data', ended.output, 'artifacts', ended.artifacts, 'decision_report', ended.decision_report)
FROM lineshaft.task_end AS ended
CROSS JOIN LATERAL (
    SELECT coalesce(sum(cost_usd), 0) AS cost_usd, coalesce(sum(tokens_input), 0) AS tokens_input,
        coalesce(sum(tokens_output), 0) AS tokens_output
    FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch <> ended.epoch
) AS earlier
-- A batch has no attempts.
WHERE ended.id = ANY (%(ids)s::text[]) AND ended.status = 'COMPLETED' AND ended.claimed_at IS NOT NULL
ON CONFLICT (task_id, epoch) DO UPDATE SET output = excluded.output

-- name: reopen_edges
-- What runs again, and what waits, waits for what runs again. `ids` are those that run again, `waiting` the others. A batch of these waits for
-- its children only: if they have begun, it goes on. (A task with a list waits for the list.)
UPDATE lineshaft.edge
SET satisfied = false
WHERE edge.depends_on = ANY (%(ids)s::text[]) AND edge.satisfied
  AND edge.task_id = ANY (%(ids)s::text[] || %(waiting)s::text[])
  AND (
    SELECT live.is_batch
        AND (SELECT upstream.parent_id FROM lineshaft.task AS upstream WHERE upstream.id = edge.depends_on) IS DISTINCT FROM live.id
        AND NOT EXISTS (SELECT FROM lineshaft.task WHERE task.id = live.id AND task.for_each IS NOT NULL)
    FROM lineshaft.task_live AS live WHERE live.id = edge.task_id
  ) IS NOT TRUE

-- name: count_open
-- How many tasks each of these waits for.
SELECT waiting.id, (SELECT count(*) FROM lineshaft.edge WHERE edge.task_id = waiting.id AND NOT edge.satisfied)::integer AS n
FROM unnest(%(ids)s::text[]) AS waiting (id)

-- name: block_waiting
-- READY or RETRYING → PENDING; a retry that isn't due yet still waits for its time. Guarded by the row locks that lock_tasks holds.
UPDATE lineshaft.task_live AS live
SET blocked = waiting.n, status = 'PENDING', parked = CASE WHEN live.admission ? 'fair' THEN 'fair' END, parked_key = NULL,
    due_at = CASE WHEN live.due_at > coalesce(%(now)s::timestamptz, now()) THEN live.due_at END
FROM unnest(%(ids)s::text[], %(open)s::integer[]) AS waiting (id, n)
WHERE live.id = waiting.id

-- name: mark_dags
-- Their later completion is one after a rerun: see is_rerun_1. Follows what locks their rows.
UPDATE lineshaft.dag
SET rerun_after = (SELECT last_value FROM lineshaft.event_seq_seq)
WHERE dag.id = ANY (ARRAY(SELECT task.dag_id FROM lineshaft.task WHERE task.id = ANY (%(ids)s::text[]))) AND dag.rerun_after IS NULL

-- name: forget_checkpoints
DELETE FROM lineshaft.checkpoint WHERE task_id = ANY (%(ids)s::text[])
