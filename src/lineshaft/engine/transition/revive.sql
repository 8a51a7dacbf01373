-- Tasks that come back, and priorities that follow from who waits. Used by store/reviving.py.

-- name: revive_tasks
-- From DEAD_LETTERED or CANCELLED back to PENDING or READY: counters start anew, the epoch goes on so that no zombie ever matches. An edge to a
-- task that completed meanwhile is satisfied; all others count.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
ended AS (
    DELETE FROM lineshaft.task_end
    USING unnest(%(ids)s::text[], %(lane_ids)s::integer[], %(delays)s::double precision[], %(lock_owners)s::text[])
        AS input (id, lane_id, delay, lock_owner)
    WHERE task_end.id = input.id AND task_end.status IN ('DEAD_LETTERED', 'CANCELLED')
    RETURNING task_end.*, input.lane_id, input.delay, input.lock_owner
)
INSERT INTO lineshaft.task_live (
    id, dag_id, status, lane_id, priority, downstream, blocked, deadline, rank, rekey_at, ready_at, due_at, generation, lock_key,
    lock_owner, heartbeat_sec, limit_sec, is_batch, is_gated, epoch, revivals, cost_usd, tokens_input, tokens_output, first_started_at,
    awaited
)
SELECT
    task.id, dag.id,
    CASE WHEN open.n > 0 OR ended.delay > 0 OR task.is_batch THEN 'PENDING' ELSE 'READY' END::lineshaft.task_status,
    ended.lane_id, task.priority, 0, open.n, task.deadline,
    lineshaft.rank(task.priority, 0::smallint, task.priority_boost_per_minute, clock.now, task.deadline, clock.now),
    -- A deadline that passed while it lay there is still to be told; one that passed before has been.
    coalesce(lineshaft.rekey_at(task.deadline, clock.now), CASE WHEN ended.ended_at < task.deadline THEN task.deadline END),
    CASE WHEN open.n > 0 OR ended.delay > 0 OR task.is_batch THEN NULL ELSE clock.now END,
    CASE
        WHEN ended.delay > 0 THEN clock.now + make_interval(secs => ended.delay)
        -- Its children are all done: whoever called ends it in this transaction.
        WHEN task.is_batch AND open.n = 0 THEN clock.now
    END,
    (SELECT last_value FROM lineshaft.generation_no),
    task.lock_key, ended.lock_owner, task.heartbeat_interval_sec, task.max_duration_sec, task.is_batch,
    task.gates IS NOT NULL OR task.require_decision_report, ended.epoch, ended.revivals + 1,
    ended.cost_usd, ended.tokens_input, ended.tokens_output, ended.first_started_at,
    -- Perhaps: what came to wait for it while it lay there didn't mark it.
    true
FROM ended
JOIN lineshaft.task ON task.id = ended.id
CROSS JOIN clock
LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
CROSS JOIN LATERAL (
    SELECT count(*)::integer AS n FROM lineshaft.edge WHERE edge.task_id = task.id AND NOT edge.satisfied
) AS open
RETURNING id, dag_id, status::text, lane_id, epoch, is_batch AND blocked = 0 AS batch_done

-- name: rekey_paths
-- The critical path below these tasks has changed, and so has that of whatever they wait for. Ten levels each way are enough: the
-- boost stops at ten. A row that is just being moved by another is left as it is: it may be a point or so off its turn.
WITH RECURSIVE above AS (
    SELECT id COLLATE "C", 0 AS height FROM unnest(%(ids)s::text[]) AS changed (id)
    UNION
    SELECT edge.depends_on, above.height + 1
    FROM above JOIN lineshaft.edge ON edge.task_id = above.id AND NOT edge.satisfied
    WHERE above.height <= 10
),
below AS (
    SELECT live.id AS origin, live.id, 0 AS depth
    FROM lineshaft.task_live AS live WHERE live.id = ANY (ARRAY(SELECT DISTINCT id FROM above))
    UNION
    SELECT below.origin, live.id, below.depth + 1
    FROM below
    JOIN lineshaft.edge ON edge.depends_on = below.id AND NOT edge.satisfied
    JOIN lineshaft.task_live AS live ON live.id = edge.task_id
    WHERE below.depth < 10
),
length AS MATERIALIZED (
    SELECT origin AS id, max(depth)::smallint AS n FROM below GROUP BY origin
),
free AS MATERIALIZED (
    SELECT live.id, length.n
    FROM length JOIN lineshaft.task_live AS live ON live.id = length.id
    WHERE least(live.downstream, 10) <> length.n
    ORDER BY live.id
    FOR UPDATE OF live SKIP LOCKED
)
UPDATE lineshaft.task_live AS live
SET downstream = free.n,
    rank = lineshaft.rank(
        live.priority, free.n, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
    ),
    -- A deadline that was missed is left to rekey_deadlines, which tells.
    rekey_at = coalesce(lineshaft.rekey_at(live.deadline, clock.now), live.rekey_at)
FROM free, lineshaft.lane, (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = free.id AND lane.id = live.lane_id
