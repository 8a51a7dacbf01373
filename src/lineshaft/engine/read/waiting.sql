-- Tasks that wait, in groups of one lane and one state: a lane's tasks can be claimed by the same agents. Never counts a large table: see
-- waiting.py.

-- fragment: state
-- As in why.py.
CASE
    WHEN status = 'RETRYING' THEN 'retrying'
    WHEN status = 'PENDING' THEN CASE WHEN blocked > 0 THEN 'blocked' ELSE coalesce(suspended, 'scheduled') END
    WHEN parked = 'dag_budget' THEN 'dag_budget'
    WHEN parked = 'lock' OR refused THEN 'lock'
    WHEN parked = 'quota' THEN 'quota'
    ELSE 'ready'
END AS state

-- fragment: group_columns
lane_id, state, count(*)::integer AS n, min(ready_at) AS oldest,
-- What waits for a signal without a time limit is due in a year, to be looked at.
min(due_at) FILTER (WHERE state <> 'waiting_signal') AS due, min(id) AS first_id

-- fragment: suspended
-- Whether it sleeps or waits for a signal: only what has been claimed before does.
CASE WHEN live.status = 'PENDING' AND live.due_at IS NOT NULL AND live.epoch > 0 THEN (
    SELECT CASE WHEN wait.signal IS NULL THEN 'sleeping' ELSE 'waiting_signal' END
    FROM lineshaft.wait WHERE wait.task_id = live.id AND wait.epoch = live.epoch
) END AS suspended

-- fragment: refused
-- Whether its lock is held, though no claim has parked it yet: few tasks have a lock.
live.lock_key IS NOT NULL AND CASE WHEN live.admission ? 'locks' THEN live.status = 'READY' AND lineshaft.refused_lock_1(
    live.id, live.lock_owner, live.lock_key, live.admission -> 'locks', coalesce(%(now)s::timestamptz, now())
) IS NOT NULL ELSE EXISTS (
    SELECT FROM lineshaft.lock AS held
    LEFT JOIN lineshaft.task_live AS holder ON holder.id = held.holder_task_id
    CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    WHERE held.key = live.lock_key AND
    -- include: lock_refused
) END AS refused

-- name: plan_by_index
-- What is sent after it looks a few rows up in large tables, and never reads one.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true)

-- name: table_size
-- live_rows up to `most`.
SELECT coalesce(%(now)s::timestamptz, now()) AS now,
    pg_relation_size('lineshaft.task_live') / current_setting('block_size')::integer AS live_pages,
    (SELECT count(*) FROM (SELECT id FROM lineshaft.task_live ORDER BY id LIMIT %(most)s::integer) AS some_tasks)::integer AS live_rows

-- name: counted
-- All, if there are few.
SELECT
-- include: group_columns
FROM (
    SELECT id, lane_id, ready_at, due_at,
    -- include: state
    FROM (
        SELECT live.*,
        -- include: suspended
        ,
        -- include: refused
        FROM lineshaft.task_live AS live
        WHERE live.status IN ('PENDING', 'READY', 'RETRYING')
    ) AS live
) AS live
GROUP BY lane_id, state

-- name: indexed
-- What has its own index, each up to `most` rows.
SELECT source,
-- include: group_columns
FROM (
    SELECT source, id, lane_id, ready_at, due_at,
    -- include: state
    FROM (
        (SELECT 'due' AS source, id, lane_id, ready_at, due_at, status, blocked, parked, false AS refused,
            -- include: suspended
         FROM lineshaft.task_live AS live
         WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'lock', id, lane_id, ready_at, due_at, status, blocked, parked, false, NULL FROM lineshaft.task_live
         WHERE status = 'READY' AND lock_key IS NOT NULL AND parked = 'lock' LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'dag_budget', id, lane_id, ready_at, due_at, status, blocked, parked, false, NULL FROM lineshaft.task_live
         WHERE parked = 'dag_budget' LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'quota', id, lane_id, ready_at, due_at, status, blocked, parked, false, NULL FROM lineshaft.task_live
         WHERE parked_key IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'turn', id, lane_id, ready_at, due_at, status, blocked, parked, false, NULL FROM lineshaft.task_live
         WHERE status = 'READY' AND parked = 'fair' AND parked_key IS NULL LIMIT %(most)s::integer)
    ) AS live
) AS live
GROUP BY source, lane_id, state

-- name: sampled
-- The rest.
SELECT
-- include: group_columns
FROM (
    SELECT id, lane_id, ready_at, due_at,
    -- include: state
    FROM (
        SELECT live.*, NULL AS suspended,
        -- include: refused
        FROM lineshaft.task_live AS live TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
        WHERE (live.status = 'PENDING' AND live.due_at IS NULL) OR (live.status = 'READY' AND live.parked IS NULL)
    ) AS live
) AS live
GROUP BY lane_id, state

-- name: gates
-- Outputs that wait for a gate that runs elsewhere, by attempt_gated; the types of some of them.
SELECT few.gate = 'human' AS by_person, few.gate_blocked_by IS NOT NULL AS lacks_money, count(*)::integer AS n, min(few.gate_since) AS oldest,
    -- Outputs beyond the first hundred are counted, but their types aren't read.
    coalesce((array_agg(DISTINCT task.type) FILTER (WHERE task.type IS NOT NULL))[:%(types)s::integer], '{}') AS types
FROM (
    SELECT attempt.task_id, attempt.gate, attempt.gate_since, attempt.gate_blocked_by, row_number() OVER () AS no
    FROM lineshaft.attempt WHERE attempt.outcome = 'validating' AND attempt.gate IS NOT NULL
    LIMIT %(most)s::integer
) AS few
LEFT JOIN lineshaft.task ON task.id = few.task_id AND few.no <= 100
GROUP BY 1, 2

-- name: below_dead_letters
-- PENDING tasks below the newest dead letters, directly or not. The recursion produces rows on demand, so LIMIT bounds it.
WITH RECURSIVE dead AS MATERIALIZED (
    SELECT id FROM lineshaft.task_end WHERE status = 'DEAD_LETTERED' AND status <> 'COMPLETED' ORDER BY ended_at DESC LIMIT %(dead)s::integer
),
below AS (
    SELECT edge.task_id FROM dead JOIN lineshaft.edge ON edge.depends_on = dead.id AND NOT edge.satisfied
    UNION
    SELECT edge.task_id FROM below JOIN lineshaft.edge ON edge.depends_on = below.task_id AND NOT edge.satisfied
)
SELECT live.lane_id, count(*)::integer AS n, min(live.id) AS first_id, (SELECT count(*) FROM dead)::integer AS dead
FROM (SELECT task_id FROM below LIMIT %(most)s::integer) AS some_tasks
JOIN lineshaft.task_live AS live ON live.id = some_tasks.task_id AND live.status = 'PENDING' AND live.blocked > 0
GROUP BY live.lane_id

-- name: lanes
-- As a READY task of each lane is for why.py.
SELECT
    clock.now, lane.id::text AS id, 'READY' AS status, NULL AS fair_key, lane.type, lane.required_capabilities, lane.models, NULL AS parked,
    lineshaft.reservation_2(lane.cost_from_usd, limits.default_max_cost_usd)::numeric(20, 6) AS cost_usd,
    lineshaft.needed_1(lane.cost_from_usd, limits.default_max_cost_usd) AS needed_usd, lane.cost_from_usd IS NULL AS open_ended,
    false AS expired, NULL::timestamptz AS deadline, NULL AS lock_key, false AS lock_refused, NULL::numeric AS budget_ceiling_usd,
    -- include: barriers_of_type
    ,
    CASE WHEN limits.quota_kinds & 1 <> 0 THEN lineshaft.full_quotas_1(lineshaft.lane_keys_1(lane.type, NULL, NULL, NULL), clock.now) END AS full_quotas
FROM lineshaft.lane
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
CROSS JOIN lineshaft.limits
-- include: joined_barriers
WHERE lane.id = ANY (%(ids)s::integer[])

-- name: created
-- Ids begin with the time of submission: the first of a group is its oldest task.
SELECT id, created_at FROM lineshaft.task WHERE id = ANY (%(ids)s::text[])
