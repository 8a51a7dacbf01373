-- What people and programs look at: tasks, DAGs, why a task waits, figures. Used by store/insights.py, store/listing.py, store/why.py
-- and store/stats.py. Nothing here writes.
--
-- The statements of one answer run in one snapshot, so that a task is not both READY in the list and RUNNING in its object. Lists are made
-- in two steps: statements named keys_… find which tasks, read_tasks makes the objects.

-- name: snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: plan_for_filters
-- For statements with optional filters: what isn't asked for is left out of the plan, joins included. The pool's setting, one plan for
-- all and no hash joins, is for the hot path. Its others stay: a large table is read by index wherever there is one. Parallel workers
-- start up in the time that a page takes, and would be taken from others.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_hashjoin', 'on', true),
    set_config('max_parallel_workers_per_gather', '0', true)

-- name: plan_to_walk
-- For lists that walk from the newest task on and stop when the page is full: not to collect and sort all that they might look at.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true)

-- name: plan_to_scan
-- For the one list that reads a whole table. Where a scan is priced as forbidden, all joins look alike beside it, and the worst may be taken.
SELECT set_config('enable_seqscan', 'on', true)

-- name: read_tasks
-- All columns of these tasks, whichever table they live in; what belongs to several rows is read by the statements below.
SELECT
    clock.now,
    task.id, task.dag_id, task.parent_id, task.idempotency_key, task.type, task.title, task.spec, task.preset,
    task.required_capabilities, task.model_preferences, task.fallback_models, task.max_cost_usd, task.max_total_cost_usd,
    task.max_duration_sec, task.heartbeat_interval_sec, task.priority_boost_per_minute, task.lock_key, task.max_attempts, task.retry,
    task.gates, task.require_decision_report, task.is_batch, task.tags, task.created_by, task.created_at, task.surface,
    coalesce(live.status, ended.status)::text AS status,
    coalesce(live.priority, task.priority) AS priority,
    CASE WHEN live.id IS NULL THEN task.deadline ELSE live.deadline END AS deadline,
    live.downstream,
    CASE WHEN live.status = 'PENDING' THEN coalesce(live.due_at, task.run_at) ELSE task.run_at END AS run_at,
    CASE WHEN live.status = 'RETRYING' THEN live.due_at END AS retry_at,
    coalesce(live.blocked, 0) AS blocked,
    live.parked,
    coalesce(live.epoch, ended.epoch) AS epoch,
    coalesce(live.attempts, ended.attempts) AS attempts,
    coalesce(live.revivals, ended.revivals) AS revivals,
    coalesce(live.agent_id, ended.agent_id) AS agent_id,
    coalesce(live.model, ended.model) AS model,
    coalesce(live.claimed_at, ended.claimed_at) AS claimed_at,
    live.heartbeat_at,
    live.lease_until,
    coalesce(live.heartbeat_sec, task.heartbeat_interval_sec, agent.heartbeat_interval_sec, 30) AS heartbeat_in_force,
    coalesce(live.ready_at, ended.ready_at) AS ready_at,
    -- Of the attempt under way, else of the first one there was. A batch has none: it began with the first of what is in it (R-192).
    CASE WHEN NOT task.is_batch THEN coalesce(live.started_at, live.first_started_at, ended.started_at, ended.first_started_at)
        ELSE (
            WITH RECURSIVE inside AS (
                SELECT child.id, child.is_batch FROM lineshaft.task AS child WHERE child.parent_id = task.id
                UNION ALL
                SELECT child.id, child.is_batch
                FROM inside JOIN lineshaft.task AS child ON child.parent_id = inside.id AND inside.is_batch
            )
            SELECT min(coalesce(going.first_started_at, gone.first_started_at))
            FROM inside
            LEFT JOIN lineshaft.task_live AS going ON going.id = inside.id
            LEFT JOIN lineshaft.task_end AS gone ON gone.id = inside.id
        ) END AS started_at,
    ended.ended_at,
    ended.reason,
    ended.category,
    (coalesce(live.cost_usd + live.attempt_cost_usd, ended.cost_usd))::numeric(14, 6) AS cost_usd,
    coalesce(live.reserved_usd, 0) AS reserved_usd,
    coalesce(live.tokens_input, ended.tokens_input) AS tokens_input,
    coalesce(live.tokens_output, ended.tokens_output) AS tokens_output,
    live.progress,
    -- What is being validated is with its attempt: whoever decides about it must see it.
    coalesce(CASE WHEN live.status = 'VALIDATING' THEN handed_in.output ->> 'type' ELSE ended.output_type END, task.output_type) AS output_type,
    CASE WHEN live.status = 'VALIDATING' THEN handed_in.output -> 'data' ELSE ended.output END AS data,
    CASE WHEN live.status = 'VALIDATING' THEN nullif(handed_in.output -> 'artifacts', 'null') ELSE ended.artifacts END AS artifacts,
    CASE WHEN live.status = 'VALIDATING' THEN nullif(handed_in.output -> 'decision_report', 'null')
        ELSE ended.decision_report END AS decision_report
FROM lineshaft.task
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
LEFT JOIN lineshaft.agent ON agent.id = coalesce(live.agent_id, ended.agent_id)
LEFT JOIN lineshaft.attempt AS handed_in
    ON live.status = 'VALIDATING' AND handed_in.task_id = live.id AND handed_in.epoch = live.epoch
WHERE task.id = ANY (%(ids)s::text[])

-- name: read_edges
SELECT task_id, depends_on, satisfied FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) ORDER BY task_id, depends_on

-- name: read_failures
-- Attempts that failed, and waits for a rate limit, which are no failures (U13) but tell why a task is RETRYING.
SELECT task_id, number, revival, outcome, agent_id, category, error, claimed_at, started_at, ended_at, cost_usd
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome IN ('failed', 'rate_limited')
ORDER BY task_id, epoch

-- name: upstream
-- Everything that these tasks wait for, directly or not, as open edges with how the upstream ended. The recursion stops with the limit: it
-- runs only as far as rows are asked for.
WITH RECURSIVE open_edge AS (
    SELECT task_id, depends_on FROM lineshaft.edge WHERE task_id = ANY (%(ids)s::text[]) AND NOT satisfied
    UNION
    SELECT edge.task_id, edge.depends_on
    FROM open_edge JOIN lineshaft.edge ON edge.task_id = open_edge.depends_on AND NOT edge.satisfied
)
SELECT open_edge.task_id, open_edge.depends_on, coalesce(ended.status, live.status)::text AS status, live.due_at
FROM open_edge
LEFT JOIN lineshaft.task_end AS ended ON ended.id = open_edge.depends_on
LEFT JOIN lineshaft.task_live AS live ON live.id = open_edge.depends_on
LIMIT %(most)s::integer

-- name: attempts
-- The table has those that ended without success or are being validated; the one under way and the one that succeeded are told by the
-- task's own row. Money and tokens of the latter are what the others leave of the task's totals.
WITH recorded AS MATERIALIZED (
    SELECT * FROM lineshaft.attempt WHERE task_id = %(id)s::text
),
own AS MATERIALIZED (
    SELECT live.epoch, live.attempts + 1 AS number, live.revivals AS revival, live.agent_id, live.model, 'running' AS outcome,
        live.claimed_at, live.started_at, NULL::timestamptz AS ended_at, live.attempt_cost_usd AS cost_usd,
        0::numeric AS tokens_input, 0::numeric AS tokens_output, NULL::jsonb AS output
    FROM lineshaft.task_live AS live
    WHERE live.id = %(id)s::text AND live.status IN ('CLAIMED', 'RUNNING')
    UNION ALL
    SELECT ended.epoch, ended.attempts + 1, ended.revivals, ended.agent_id, ended.model, 'completed',
        ended.claimed_at, ended.started_at, ended.ended_at, ended.cost_usd - earlier.cost_usd,
        ended.tokens_input - earlier.tokens_input, ended.tokens_output - earlier.tokens_output,
        jsonb_build_object('data', ended.output, 'artifacts', ended.artifacts, 'decision_report', ended.decision_report)
    FROM lineshaft.task_end AS ended
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(cost_usd), 0) AS cost_usd, coalesce(sum(tokens_input), 0) AS tokens_input,
            coalesce(sum(tokens_output), 0) AS tokens_output
        FROM recorded WHERE recorded.epoch < ended.epoch
    ) AS earlier
    -- A batch has no attempts of its own.
    WHERE ended.id = %(id)s::text AND ended.status = 'COMPLETED' AND ended.claimed_at IS NOT NULL
)
SELECT epoch, number::integer AS number, revival::integer AS revival, agent_id, model, outcome, category, error, claimed_at, started_at,
    ended_at, cost_usd::numeric(14, 6) AS cost_usd, tokens_input::bigint AS tokens_input, tokens_output::bigint AS tokens_output, output
FROM (
    SELECT epoch, number, revival, agent_id, model, outcome, category, error, claimed_at, started_at, ended_at, cost_usd, tokens_input,
        tokens_output, output
    FROM recorded WHERE recorded.epoch NOT IN (SELECT own.epoch FROM own)
    UNION ALL
    SELECT epoch, number, revival, agent_id, model, outcome, NULL, NULL, claimed_at, started_at, ended_at, cost_usd, tokens_input,
        tokens_output, output
    FROM own
) AS attempt
ORDER BY epoch

-- name: steps
SELECT name, data FROM lineshaft.step WHERE task_id = %(id)s::text ORDER BY recorded_at, name

-- name: task_exists
SELECT FROM lineshaft.task WHERE id = %(id)s::text


-- Which tasks a list has. Where a filter leaves few, statements named ids_… collect them all, at most `most`, and keys_among or
-- keys_by_priority sort them. Otherwise keys_by_age walks through all tasks, newest first, no further than `scan` rows at a time.

-- name: ids_of_parents
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task WHERE parent_id = ANY (%(parent_ids)s::text[]) LIMIT %(most)s::integer
) AS found

-- name: ids_of_dags
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task WHERE dag_id = ANY (%(dag_ids)s::text[]) LIMIT %(most)s::integer
) AS found

-- name: ids_of_documents
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task WHERE lock_key = ANY (%(lock_keys)s::text[]) LIMIT %(most)s::integer
) AS found

-- name: ids_tagged
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task WHERE tags && %(tags)s::text[] AND tags <> '{}' LIMIT %(most)s::integer
) AS found

-- name: ids_held
-- In an agent's hands: through the index of leases.
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task_live
    WHERE lease_until IS NOT NULL AND (%(agent_ids)s::text[] IS NULL OR agent_id = ANY (%(agent_ids)s::text[]))
    LIMIT %(most)s::integer
) AS found

-- name: ids_retrying
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task_live
    WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL AND status = 'RETRYING'
    LIMIT %(most)s::integer
) AS found

-- name: ids_live
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task_live
    WHERE status = ANY (%(live)s::text[]::lineshaft.task_status[]) AND (%(batches)s::boolean IS NULL OR is_batch)
    LIMIT %(most)s::integer
) AS found

-- name: ids_ended_badly
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task_end
    WHERE status <> 'COMPLETED' AND status = ANY (%(ended)s::text[]::lineshaft.task_status[])
    LIMIT %(most)s::integer
) AS found

-- name: ids_completed
SELECT array_agg(id) AS ids FROM (
    SELECT id FROM lineshaft.task_end WHERE status = 'COMPLETED' LIMIT %(most)s::integer
) AS found

-- name: keys_by_age
-- Newest first, through task_by_age. The last row of the part that was looked at comes too, fitting or not: the list goes on behind it.
SELECT created_at, id, coalesce(fits, false) AS fits, n = %(scan)s::integer AS is_last
FROM (
    SELECT looked_at.*, row_number() OVER (ORDER BY created_at DESC, id DESC) AS n
    FROM (
        SELECT task.created_at, task.id,
            (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
            AND (%(created_by)s::text[] IS NULL OR task.created_by = ANY (%(created_by)s::text[]))
            AND (%(patterns)s::text[] IS NULL OR task.title ILIKE ANY (%(patterns)s::text[]))
            AND (%(tags)s::text[] IS NULL OR task.tags && %(tags)s::text[])
            AND (%(dag_ids)s::text[] IS NULL OR task.dag_id = ANY (%(dag_ids)s::text[]))
            AND (%(parent_ids)s::text[] IS NULL OR task.parent_id = ANY (%(parent_ids)s::text[]))
            AND (%(lock_keys)s::text[] IS NULL OR task.lock_key = ANY (%(lock_keys)s::text[]))
            AND (%(batches)s::boolean IS NULL OR task.is_batch)
            AND (%(priority_to)s::integer IS NULL
                 OR coalesce(live.priority, task.priority) BETWEEN %(priority_from)s::integer AND %(priority_to)s::integer)
            AND (%(any_status)s::boolean
                 OR (%(live)s::text[] IS NOT NULL AND live.status = ANY (%(live)s::text[]::lineshaft.task_status[]))
                 OR (%(ended)s::text[] IS NOT NULL AND ended.status = ANY (%(ended)s::text[]::lineshaft.task_status[])))
            AND (%(agent_ids)s::text[] IS NULL OR coalesce(live.agent_id, ended.agent_id) = ANY (%(agent_ids)s::text[])) AS fits
        FROM lineshaft.task
        LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
        LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
        WHERE (task.created_at, task.id)
            < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
        ORDER BY task.created_at DESC, task.id DESC
        LIMIT %(scan)s::integer
    ) AS looked_at
) AS numbered
WHERE fits OR n = %(scan)s::integer
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s::integer

-- name: keys_among
-- The same for a few tasks, collected first and then sorted: the planner would rather walk.
WITH few AS MATERIALIZED (
    SELECT created_at, id, dag_id, parent_id, type, title, tags, created_by, lock_key, is_batch, priority
    FROM lineshaft.task WHERE id = ANY (%(ids)s::text[])
)
SELECT task.created_at, task.id, true AS fits, false AS is_last
FROM few AS task
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE (task.created_at, task.id) < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
  AND (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
  AND (%(created_by)s::text[] IS NULL OR task.created_by = ANY (%(created_by)s::text[]))
  AND (%(patterns)s::text[] IS NULL OR task.title ILIKE ANY (%(patterns)s::text[]))
  AND (%(tags)s::text[] IS NULL OR task.tags && %(tags)s::text[])
  AND (%(dag_ids)s::text[] IS NULL OR task.dag_id = ANY (%(dag_ids)s::text[]))
  AND (%(parent_ids)s::text[] IS NULL OR task.parent_id = ANY (%(parent_ids)s::text[]))
  AND (%(lock_keys)s::text[] IS NULL OR task.lock_key = ANY (%(lock_keys)s::text[]))
  AND (%(batches)s::boolean IS NULL OR task.is_batch)
  AND (%(priority_to)s::integer IS NULL
       OR coalesce(live.priority, task.priority) BETWEEN %(priority_from)s::integer AND %(priority_to)s::integer)
  AND (%(any_status)s::boolean
       OR (%(live)s::text[] IS NOT NULL AND live.status = ANY (%(live)s::text[]::lineshaft.task_status[]))
       OR (%(ended)s::text[] IS NOT NULL AND ended.status = ANY (%(ended)s::text[]::lineshaft.task_status[])))
  AND (%(agent_ids)s::text[] IS NULL OR coalesce(live.agent_id, ended.agent_id) = ANY (%(agent_ids)s::text[]))
ORDER BY task.created_at DESC, task.id DESC
LIMIT %(limit)s::integer

-- name: keys_by_priority
-- What has not ended, by rank as claims see it, at the instant at which the first page was read; ids NULL: all. What was never READY has
-- no age. To a millionth, as in claims: what is equal is in the order of submission.
WITH lane AS MATERIALIZED (
    SELECT id, type, boost_per_minute * lineshaft.minutes(%(as_of)s::timestamptz) AS aged FROM lineshaft.lane ORDER BY id
),
live AS (
    SELECT live.id, live.submission_no, live.priority, round(1e6 * CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, %(as_of)s::timestamptz, live.deadline, %(as_of)s::timestamptz)
    END) AS effective
    FROM lineshaft.task_live AS live
    JOIN lane ON lane.id = live.lane_id
    WHERE (%(ids)s::text[] IS NULL OR live.id = ANY (%(ids)s::text[]))
      AND live.status = ANY (%(live)s::text[]::lineshaft.task_status[])
      AND (%(agent_ids)s::text[] IS NULL OR live.agent_id = ANY (%(agent_ids)s::text[]))
      AND (%(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[]))
)
SELECT live.effective, live.submission_no, live.id
FROM live
LEFT JOIN lineshaft.task ON task.id = live.id
WHERE (live.effective, live.submission_no) > (
        coalesce(%(after_effective)s::double precision, '-infinity'), coalesce(%(after_no)s::bigint, 0)
    )
  AND (%(created_by)s::text[] IS NULL OR task.created_by = ANY (%(created_by)s::text[]))
  AND (%(patterns)s::text[] IS NULL OR task.title ILIKE ANY (%(patterns)s::text[]))
  AND (%(tags)s::text[] IS NULL OR task.tags && %(tags)s::text[])
  AND (%(dag_ids)s::text[] IS NULL OR task.dag_id = ANY (%(dag_ids)s::text[]))
  AND (%(parent_ids)s::text[] IS NULL OR task.parent_id = ANY (%(parent_ids)s::text[]))
  AND (%(lock_keys)s::text[] IS NULL OR task.lock_key = ANY (%(lock_keys)s::text[]))
  AND (%(batches)s::boolean IS NULL OR task.is_batch)
  AND (%(priority_to)s::integer IS NULL OR live.priority BETWEEN %(priority_from)s::integer AND %(priority_to)s::integer)
ORDER BY live.effective, live.submission_no
LIMIT %(limit)s::integer

-- name: keys_of_ready
-- READY tasks of some types or all, by rank as a claim sees them, however many there are: the heads of each lane through
-- task_live_claimable, and the parked ones through their indexes.
WITH wanted AS MATERIALIZED (
    SELECT lane.id, lane.boost_per_minute * lineshaft.minutes(%(as_of)s::timestamptz) AS aged
    FROM lineshaft.lane
    WHERE %(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[])
),
after AS MATERIALIZED (
    SELECT coalesce(%(after_effective)s::double precision, '-infinity') AS effective, coalesce(%(after_no)s::bigint, 0) AS no
)
SELECT effective, submission_no, id
FROM (
    SELECT round((next.rank - wanted.aged) * 1e6) AS effective, next.submission_no, next.id
    FROM wanted
    CROSS JOIN after
    CROSS JOIN lineshaft.generation
    CROSS JOIN LATERAL (
        SELECT id, rank, submission_no
        FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = generation.no AND lane_id = wanted.id
          -- For the index, a little low because of the rounding; then exactly.
          AND rank >= (after.effective - 1) / 1e6 + wanted.aged
          AND (round((rank - wanted.aged) * 1e6), submission_no) > (after.effective, after.no)
        ORDER BY rank, submission_no
        -- Room for those that are in another order here, because they differ by less than a millionth.
        LIMIT 2 * %(limit)s::integer
        OFFSET 0
    ) AS next
    UNION ALL
    SELECT round((live.rank - wanted.aged) * 1e6), live.submission_no, live.id
    FROM (
        SELECT id, lane_id, rank, submission_no FROM lineshaft.task_live
        WHERE status = 'READY' AND lock_key IS NOT NULL AND parked = 'lock'
        UNION ALL
        SELECT id, lane_id, rank, submission_no FROM lineshaft.task_live WHERE parked = 'dag_budget'
    ) AS live
    JOIN wanted ON wanted.id = live.lane_id
    CROSS JOIN after
    WHERE (round((live.rank - wanted.aged) * 1e6), live.submission_no) > (after.effective, after.no)
) AS found
ORDER BY effective, submission_no
LIMIT %(limit)s::integer

-- name: read_now
SELECT coalesce(%(now)s::timestamptz, now()) AS now


-- DAGs. One that is virtual, a standalone task's, has no row: its task tells everything.

-- name: dag_keys_by_age
-- Newest first, as keys_by_age. A virtual DAG is listed at its task's place.
SELECT created_at, id, dag_id, coalesce(fits, false) AS fits, n = %(scan)s::integer AS is_last
FROM (
    SELECT looked_at.*, row_number() OVER (ORDER BY created_at DESC, id DESC) AS n
    FROM (
        (
            SELECT dag.created_at, dag.id, dag.id AS dag_id,
                (%(statuses)s::text[] IS NULL OR dag.status::text = ANY (%(statuses)s::text[]))
                AND (%(created_by)s::text[] IS NULL OR dag.created_by = ANY (%(created_by)s::text[]))
                AND (%(patterns)s::text[] IS NULL OR dag.title ILIKE ANY (%(patterns)s::text[])) AS fits
            FROM lineshaft.dag
            WHERE (dag.created_at, dag.id)
                < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
            ORDER BY dag.created_at DESC, dag.id DESC
            LIMIT %(scan)s::integer
        )
        UNION ALL
        (
            SELECT task.created_at, task.id, task.dag_id,
                NOT EXISTS (SELECT FROM lineshaft.dag WHERE dag.id = task.dag_id)
                AND (%(statuses)s::text[] IS NULL OR CASE
                    WHEN ended.status = 'COMPLETED' THEN 'completed'
                    WHEN ended.status = 'CANCELLED' THEN 'cancelled'
                    WHEN ended.status = 'DEAD_LETTERED' THEN 'failed'
                    WHEN live.epoch > 0 THEN 'running'
                    ELSE 'pending'
                END = ANY (%(statuses)s::text[]))
                AND (%(created_by)s::text[] IS NULL OR task.created_by = ANY (%(created_by)s::text[]))
                AND (%(patterns)s::text[] IS NULL OR task.title ILIKE ANY (%(patterns)s::text[])) AS fits
            FROM lineshaft.task
            LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
            LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
            WHERE %(virtual)s::boolean
              AND (task.created_at, task.id)
                < (coalesce(%(after_at)s::timestamptz, 'infinity'), coalesce(%(after_id)s::text, '') COLLATE "C")
            ORDER BY task.created_at DESC, task.id DESC
            LIMIT %(scan)s::integer
        )
        ORDER BY created_at DESC, id DESC
        LIMIT %(scan)s::integer
    ) AS looked_at
) AS numbered
WHERE fits OR n = %(scan)s::integer
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s::integer

-- name: read_dags
SELECT id, title, status::text AS status, created_by, budget_ceiling_usd, reserved_usd, spent_usd, created_at, ended_at AS completed_at
FROM lineshaft.dag
WHERE id = ANY (%(ids)s::text[])

-- name: dag_members
SELECT task.dag_id, task.id, coalesce(live.status, ended.status)::text AS status, task.title, task.created_by, task.created_at,
    coalesce(live.epoch, ended.epoch) AS epoch, ended.ended_at,
    coalesce(live.cost_usd, ended.cost_usd) AS spent_usd, coalesce(live.reserved_usd, 0::numeric(14, 6)) AS reserved_usd
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


-- Why a task is not running. What makes one claimable is decided by claim_tasks; a test holds these answers against it.

-- name: why_task
SELECT
    clock.now, task.id, coalesce(live.status, ended.status)::text AS status,
    live.due_at, live.is_batch, live.parked, live.last_category, live.attempts, task.max_attempts,
    lane.type, lane.required_capabilities, lane.models, coalesce(lane.max_cost_usd, 0)::numeric(14, 6) AS cost_usd,
    live.lock_key,
    held.holder_task_id AS lock_holder, held.agent_id AS lock_agent, held.expires_at AS lock_expires_at,
    held.holder_task_id <> coalesce(live.lock_owner, live.id)
        AND (held.expires_at >= clock.now OR coalesce(holder.is_batch, false)) AS lock_refused,
    dag.id AS dag_id, dag.budget_ceiling_usd, dag.spent_usd, dag.reserved_usd,
    breaker.state::text AS breaker_state, breaker.failures, breaker.opened_at, breaker.forced, breaker.probe_task_id,
    breaker.probe_at, NOT breaker.forced AND breaker.probe_task_id IS NULL AND coalesce(breaker.probe_at < clock.now, false) AS probe_due,
    slowdown.until AS slowed_until, slowdown.reason AS slowed_because,
    -- What is left of the day's budget; NULL: there is none.
    (
        SELECT %(daily_budget)s::numeric - coalesce(sum(
            CASE WHEN purse.spend_day >= day.today THEN purse.spent_on_day_usd ELSE 0 END + purse.reserved_usd
        ), 0)
        FROM (SELECT (clock.now AT TIME ZONE 'UTC')::date AS today) AS day
        LEFT JOIN lineshaft.agent AS purse ON purse.spend_day > day.today - 31
    ) AS left_today_usd,
    ARRAY(SELECT pause.type FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused,
    ARRAY(SELECT pause.reason FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused_because,
    -- Where its output is, while that is validated.
    gated.gate, gated.gate_no, jsonb_array_length(task.gates) AS gates, gated.gate_since, gated.gate_due_at, gated.gate_runs, gated.gate_error
FROM lineshaft.task
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.attempt AS gated ON gated.task_id = live.id AND gated.epoch = live.epoch AND gated.outcome = 'validating'
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
LEFT JOIN lineshaft.lane ON lane.id = live.lane_id
LEFT JOIN lineshaft.lock AS held ON held.key = live.lock_key
LEFT JOIN lineshaft.task_live AS holder ON holder.id = held.holder_task_id
LEFT JOIN lineshaft.dag ON dag.id = live.dag_id
LEFT JOIN lineshaft.breaker ON breaker.key = lane.type AND breaker.state <> 'closed'
LEFT JOIN lineshaft.slowdown ON slowdown.key = '*' AND slowdown.until > clock.now
WHERE task.id = %(id)s::text

-- name: why_models
-- Models and providers that no claim uses now: until when, if they were slowed down; NULL: a breaker is open, and no probe is due.
SELECT key, until
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now())
UNION ALL
SELECT key, NULL FROM lineshaft.breaker
WHERE state <> 'closed' AND (forced OR probe_task_id IS NOT NULL OR coalesce(probe_at >= coalesce(%(now)s::timestamptz, now()), true))

-- name: why_agents
SELECT id, status::text AS status, types, capabilities, models_available, held, max_concurrent_tasks,
    budget_usd - spent_usd - reserved_usd AS money
FROM lineshaft.agent
ORDER BY id


-- Guards.

-- name: locks
-- With how many READY tasks want each, through task_live_wants_lock, counted up to `most`. Those of the batch that holds a lock don't wait
-- for it.
SELECT held.key, held.holder_task_id, held.agent_id, held.token, held.acquired_at, held.expires_at,
    (
        SELECT count(*) FROM (
            SELECT FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.lock_key = held.key
              AND coalesce(live.lock_owner, live.id) <> held.holder_task_id
            LIMIT %(most)s::integer
        ) AS wanting
    )::integer AS waiting
FROM lineshaft.lock AS held
WHERE %(after)s::text IS NULL OR held.key > %(after)s::text
ORDER BY held.key
LIMIT %(limit)s::integer

-- name: breakers
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced
FROM lineshaft.breaker
WHERE %(after)s::text IS NULL OR key > %(after)s::text
ORDER BY key
LIMIT %(limit)s::integer

-- name: breaker
SELECT key, state::text AS state, failures, last_failure, opened_at, half_open_at, probe_task_id, forced
FROM lineshaft.breaker WHERE key = %(key)s::text

-- name: slowdowns
-- Those in force.
SELECT key, until, reason, signalled_at
FROM lineshaft.slowdown
WHERE until > coalesce(%(now)s::timestamptz, now()) AND (%(after)s::text IS NULL OR key > %(after)s::text)
ORDER BY key
LIMIT %(limit)s::integer

-- name: pauses
SELECT type, since FROM lineshaft.pause ORDER BY type


-- Figures, without ever counting a large table: see store/stats.py. A tier is its number, from 0 for critical; it is worked out from the
-- rank, as claims do, because 004's formula costs several times as much a row. What was never READY has no age, and so no rank yet.
-- Lanes are read in order, that is by index: see plan_to_scan.

-- name: table_sizes
-- How large the tables are, in pages, and whether the live one has more than `most` rows.
SELECT coalesce(%(now)s::timestamptz, now()) AS now,
    pg_relation_size('lineshaft.task_live') / current_setting('block_size')::integer AS live_pages,
    pg_relation_size('lineshaft.task_end') / current_setting('block_size')::integer AS ended_pages,
    pg_relation_size('lineshaft.attempt') / current_setting('block_size')::integer AS attempt_pages,
    (SELECT count(*) FROM (SELECT id FROM lineshaft.task_live ORDER BY id LIMIT %(most)s::integer) AS some_tasks)::integer AS live_rows

-- name: depth_counted
-- All live tasks; for few.
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)
SELECT live.status::text AS status, live.tier, count(*)::integer AS n, min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.status, live.ready_at, width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier
    FROM lineshaft.task_live AS live
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.status, live.tier

-- name: depth_indexed
-- States that have an index of their own, each up to `most` rows: in an agent's hands, waiting for a retry, READY.
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)
SELECT live.source, live.status::text AS status, live.tier, count(*)::integer AS n,
    min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.source, live.status, live.ready_at, width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier
    FROM (
        (SELECT 'held' AS source, status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE lease_until IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'due', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'ready', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status = 'READY' AND parked IS NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'wants_lock', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status = 'READY' AND lock_key IS NOT NULL AND parked = 'lock' LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'wants_money', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE parked = 'dag_budget' LIMIT %(most)s::integer)
    ) AS live
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.source, live.status, live.tier

-- name: depth_sampled
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)
SELECT live.status::text AS status, live.tier, count(*)::integer AS n, min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.status, live.ready_at, width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier
    FROM lineshaft.task_live AS live TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.status, live.tier

-- name: oldest_of_first
-- Ids begin with the time of submission: the longest-waiting task is most likely among the first by id.
SELECT min(ready_at) AS oldest
FROM (SELECT status, ready_at FROM lineshaft.task_live ORDER BY id LIMIT 1000) AS live
WHERE status = 'READY'

-- name: ended_sampled
SELECT status::text AS status, count(*)::integer AS n
FROM lineshaft.task_end TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
GROUP BY status

-- name: ended_badly_counted
-- Through task_end_not_completed, each up to `most`.
SELECT 'CANCELLED' AS status,
    (SELECT count(*) FROM (SELECT FROM lineshaft.task_end WHERE status = 'CANCELLED' AND status <> 'COMPLETED' LIMIT %(most)s::integer) AS few)::integer AS n
UNION ALL
SELECT 'DEAD_LETTERED',
    (SELECT count(*) FROM (SELECT FROM lineshaft.task_end WHERE status = 'DEAD_LETTERED' AND status <> 'COMPLETED' LIMIT %(most)s::integer) AS few)::integer

-- name: ends_by_time
-- What ended in each part of a window and, if asked for, what the attempts that completed cost, through task_end_by_age: at most `most` rows a part.
-- A part that has more is cut at its last row's time, from which its rate can be told.
SELECT
    extract(epoch FROM part.upto - part.since)::double precision AS seconds,
    extract(epoch FROM looked_at.last - part.since)::double precision AS covered,
    looked_at.n, looked_at.completed, looked_at.cancelled, looked_at.dead_lettered, looked_at.cost_usd
FROM (
    -- Steps are rounded to microseconds; the last one ends where the window does.
    SELECT span.since + (n - 1) * span.step AS since,
        CASE WHEN n = %(parts)s::integer THEN %(upto)s::timestamptz ELSE span.since + n * span.step END AS upto
    FROM (
        SELECT %(since)s::timestamptz AS since, (%(upto)s::timestamptz - %(since)s::timestamptz) / %(parts)s::integer AS step
    ) AS span
    CROSS JOIN generate_series(1, %(parts)s::integer) AS n
) AS part
CROSS JOIN LATERAL (
    SELECT count(*)::integer AS n, max(ended_at) AS last,
        count(*) FILTER (WHERE status = 'COMPLETED')::integer AS completed,
        count(*) FILTER (WHERE status = 'CANCELLED')::integer AS cancelled,
        count(*) FILTER (WHERE status = 'DEAD_LETTERED')::integer AS dead_lettered,
        coalesce(sum(CASE WHEN %(with_cost)s::boolean AND status = 'COMPLETED' THEN cost_usd - CASE WHEN epoch > 1 THEN coalesce((
            SELECT sum(attempt.cost_usd) FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch < ended.epoch
        ), 0) ELSE 0 END END), 0) AS cost_usd
    FROM (
        SELECT id, status, ended_at, cost_usd, epoch FROM lineshaft.task_end
        WHERE ended_at > part.since AND ended_at <= part.upto
        ORDER BY ended_at
        LIMIT %(most)s::integer
    ) AS ended
) AS looked_at
ORDER BY part.since

-- name: attempts_sampled
-- What attempts cost that ended without success since then, and those whose output waits for a gate that runs elsewhere.
SELECT coalesce(sum(attempt.cost_usd), 0) AS cost_usd
FROM lineshaft.attempt TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
WHERE attempt.cost_usd > 0
  AND (
    (attempt.ended_at > %(since)s::timestamptz AND attempt.outcome NOT IN ('validating', 'completed'))
    OR (attempt.outcome = 'validating' AND EXISTS (
        SELECT FROM lineshaft.task_live AS live
        WHERE live.id = attempt.task_id AND live.epoch = attempt.epoch AND live.status = 'VALIDATING' AND live.agent_id IS NULL
    ))
  )

-- name: held_cost
-- What the attempts under way have cost so far.
SELECT coalesce(sum(attempt_cost_usd), 0) AS cost_usd
FROM (SELECT attempt_cost_usd FROM lineshaft.task_live WHERE lease_until IS NOT NULL LIMIT %(most)s::integer) AS held
