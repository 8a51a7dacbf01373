-- The statements of effects.py, which sends them in one pipeline: the tasks are locked, and everything that decides was read (lock_tasks).

-- name: requeue_tasks
-- The claim ends, the task doesn't: RETRYING after a failure or a rate limit, READY after a release, PENDING after a release with a delay or
-- while it waits for children. Guarded by the row locks that lock_tasks holds.
UPDATE lineshaft.task_live AS live
SET status = input.status::lineshaft.task_status,
    due_at = CASE WHEN input.delay IS NOT NULL THEN clock.now + make_interval(secs => input.delay) END,
    ready_at = CASE WHEN input.status = 'READY' THEN coalesce(live.ready_at, clock.now) ELSE live.ready_at END,
    rank = lineshaft.rank(
        live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
    ),
    generation = (SELECT last_value FROM lineshaft.generation_no),
    lane_id = input.lane_id,
    attempts = input.attempts, rate_limits = input.rate_limits, long_waits = input.long_waits, blocked = live.blocked + input.blocked,
    cost_usd = live.cost_usd + input.cost,
    tokens_input = live.tokens_input + input.tokens_in, tokens_output = live.tokens_output + input.tokens_out,
    last_category = coalesce(input.category, live.last_category),
    attempt_cost_usd = 0, attempt_tokens_input = 0, attempt_tokens_output = 0, reserved_usd = 0, agent_reserved = false, day_reserved = false, agent_id = NULL, incarnation = NULL, model = NULL,
    version = NULL, account = NULL, last_account = coalesce(input.account, live.last_account), lease_until = NULL, limit_at = NULL, started_at = NULL,
    claimed_at = NULL, heartbeat_at = NULL, progress = NULL, has_slots = false,
    parked = CASE WHEN live.admission ? 'fair' THEN 'fair' END, parked_key = NULL,
    lock_token = NULL
FROM unnest(
        %(ids)s::text[], %(statuses)s::text[], %(delays)s::double precision[], %(lane_ids)s::integer[], %(attempts)s::smallint[],
        %(rate_limits)s::smallint[], %(long_waits)s::smallint[], %(blocked)s::integer[], %(costs)s::numeric[], %(tokens_in)s::bigint[],
        %(tokens_out)s::bigint[], %(categories)s::text[], %(accounts)s::text[]
    ) AS input (id, status, delay, lane_id, attempts, rate_limits, long_waits, blocked, cost, tokens_in, tokens_out, category, account),
    lineshaft.lane,
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = input.id AND lane.id = input.lane_id

-- name: end_tasks
-- CANCELLED, DEAD_LETTERED, or a batch COMPLETED. Guarded by the row locks that lock_tasks holds.
WITH input AS MATERIALIZED (
    SELECT * FROM unnest(
        %(ids)s::text[], %(statuses)s::text[], %(attempts)s::smallint[], %(costs)s::numeric[], %(tokens_in)s::bigint[],
        %(tokens_out)s::bigint[], %(reasons)s::text[], %(categories)s::text[], %(outputs)s::jsonb[]
    ) AS input (id, status, attempts, cost, tokens_in, tokens_out, reason, category, output)
),
gone AS (
    DELETE FROM lineshaft.task_live AS live USING input WHERE live.id = input.id
    RETURNING live.*, input.status AS end_status, input.attempts AS end_attempts, input.cost, input.tokens_in, input.tokens_out,
        input.reason, input.category, input.output
),
-- Behind a task that waited for its turn comes the next of its key.
next_shown AS MATERIALIZED (
    SELECT lineshaft.show_next_1(first.keys, first.lanes, %(ids)s::text[])
    FROM (
        SELECT array_agg(admission ->> 'fair') AS keys, array_agg(lane_id) AS lanes FROM gone
        WHERE status = 'READY' AND parked = 'fair' AND parked_key IS NULL HAVING count(*) > 0
    ) AS first
)
INSERT INTO lineshaft.task_end (
    id, status, epoch, ended_at, ready_at, claimed_at, started_at, first_started_at, attempts, revivals, agent_id, incarnation, model, version,
    account, cost_usd, tokens_input, tokens_output, reason, category, output
)
SELECT
    id, end_status::lineshaft.task_status, epoch, coalesce(%(now)s::timestamptz, now()), ready_at, claimed_at, started_at,
    first_started_at, end_attempts, revivals, agent_id, incarnation, model, version, coalesce(account, last_account), cost_usd + cost, tokens_input + tokens_in, tokens_output + tokens_out,
    reason, category, output
FROM gone
WHERE (SELECT count(*) FROM next_shown) >= 0

-- name: record_attempts
-- How a claim ended; an attempt that was being validated has its row already.
INSERT INTO lineshaft.attempt (
    task_id, epoch, number, revival, agent_id, incarnation, instance, model, version, account, claimed_at, started_at, ended_at, outcome, category,
    error, traceback, ended_by, cost_usd, tokens_input, tokens_output
)
SELECT
    input.task_id, input.epoch, input.number, input.revival, input.agent_id, input.incarnation,
    (SELECT name FROM lineshaft.instance WHERE agent_id = input.agent_id AND incarnation = input.incarnation), input.model, input.version,
    input.account, coalesce(input.claimed_at, clock.now), input.started_at,
    clock.now, input.outcome, input.category, input.error, input.traceback, input.ended_by, input.cost, input.tokens_in, input.tokens_out
FROM unnest(
        %(task_ids)s::text[], %(epochs)s::integer[], %(numbers)s::smallint[], %(revivals)s::smallint[], %(agent_ids)s::text[],
        %(incarnations)s::integer[], %(models)s::text[], %(versions)s::text[], %(accounts)s::text[], %(claimed_at)s::timestamptz[],
        %(started_at)s::timestamptz[], %(outcomes)s::text[], %(categories)s::text[], %(errors)s::text[], %(tracebacks)s::text[], %(ended_by)s::text[], %(costs)s::numeric[],
        %(tokens_in)s::bigint[], %(tokens_out)s::bigint[]
    ) AS input (
        task_id, epoch, number, revival, agent_id, incarnation, model, version, account, claimed_at, started_at, outcome, category, error,
        traceback, ended_by, cost, tokens_in, tokens_out
    ),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ON CONFLICT (task_id, epoch) DO UPDATE
    SET outcome = excluded.outcome, category = excluded.category, error = excluded.error, traceback = excluded.traceback,
        ended_at = excluded.ended_at, ended_by = excluded.ended_by,
        gate = NULL, gate_due_at = NULL,
        -- Costs that were booked with the output, or by a gate since then, stay.
        cost_usd = greatest(attempt.cost_usd, excluded.cost_usd),
        tokens_input = greatest(attempt.tokens_input, excluded.tokens_input),
        tokens_output = greatest(attempt.tokens_output, excluded.tokens_output)

-- name: free_slots
UPDATE lineshaft.instance
SET
    -- include: free_slots
FROM unnest(%(agent_ids)s::text[], %(incarnations)s::integer[], %(counts)s::integer[]) AS share (agent_id, incarnation, n),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE instance.agent_id = share.agent_id AND instance.incarnation = share.incarnation

-- fragment: shares
-- What ends, what it cost and what it adds to the counters of its DAG.
-- Sorted as ids are everywhere, so that all transitions lock rows in one order.
SELECT agent_id COLLATE "C" AS agent_id, dag_id COLLATE "C" AS dag_id, reserved_usd, agent_reserved, day_reserved, attempt_cost_usd, actual,
    added, completed, cancelled, dead
FROM unnest(
    %(agent_ids)s::text[], %(dag_ids)s::text[], %(reserved)s::numeric[], %(agent_reserved)s::boolean[], %(day_reserved)s::boolean[],
    %(reported)s::numeric[], %(costs)s::numeric[], %(added)s::integer[], %(completed)s::integer[], %(cancelled)s::integer[],
    %(dead)s::integer[]
) AS share (
    agent_id, dag_id, reserved_usd, agent_reserved, day_reserved, attempt_cost_usd, actual, added, completed, cancelled, dead
)

-- name: settle_agents
WITH gone AS MATERIALIZED (
    -- include: shares
)
-- include: settle_agents

-- name: settle_day
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
gone AS MATERIALIZED (
    -- include: shares
),
share AS MATERIALIZED (
    -- include: day_money
),
freed AS (
    -- include: free_day
)
-- include: spend_today

-- name: settle_dags
WITH gone AS MATERIALIZED (
    -- include: shares
)
UPDATE lineshaft.dag
SET reserved_usd = dag.reserved_usd - share.reserved, spent_usd = dag.spent_usd + share.actual, total = dag.total + share.added,
    completed = dag.completed + share.completed, cancelled = dag.cancelled + share.cancelled, dead_lettered = dag.dead_lettered + share.dead
FROM (
    SELECT dag_id, sum(added) AS added, sum(completed) AS completed, sum(cancelled) AS cancelled, sum(dead) AS dead,
        -- include: dag_money
    FROM gone GROUP BY dag_id ORDER BY dag_id
) AS share
WHERE dag.id = share.dag_id

-- name: judge_dags
-- The status of DAGs, from their counters and from what can still run. Their rows are locked: of two transactions that end the last tasks
-- the second sees what the first did. Writes and logs only a change.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
verdict AS MATERIALIZED (
    SELECT dag.id,
        CASE
            WHEN dag.completed + dag.cancelled + dag.dead_lettered = dag.total THEN CASE
                -- A dead letter that its parent tolerated, by completing or when it spawned the task, counts as cancelled.
                WHEN dag.dead_lettered > 0 AND EXISTS (
                    SELECT FROM lineshaft.task
                    JOIN lineshaft.task_end AS ended ON ended.id = task.id
                    WHERE task.dag_id = dag.id AND ended.status = 'DEAD_LETTERED' AND NOT task.ignore_failure
                      AND (SELECT parent.status = 'COMPLETED' FROM lineshaft.task_end AS parent WHERE parent.id = task.parent_id) IS NOT TRUE
                    OFFSET 0
                ) THEN 'failed'
                WHEN dag.completed = 0 THEN 'cancelled'
                ELSE 'completed'
            END
            -- What waits for a task that was cancelled alone waits for nothing, as below a dead letter.
            WHEN dag.dead_lettered + dag.cancelled > 0 AND NOT EXISTS (
                -- Can anything still run? A task that waits for nothing ...
                SELECT FROM lineshaft.task
                JOIN lineshaft.task_live AS live ON live.id = task.id
                WHERE task.dag_id = dag.id AND (live.status <> 'PENDING' OR live.blocked = 0)
                OFFSET 0
            ) AND NOT EXISTS (
                -- ... or only for tasks of other DAGs, none of which waits, directly or not, for one that has failed. (A task that waits for a
                -- task of this DAG need not be considered: the other one would have to run before.)
                WITH RECURSIVE outward AS MATERIALIZED (
                    SELECT live.id
                    FROM lineshaft.task
                    JOIN lineshaft.task_live AS live ON live.id = task.id
                    WHERE task.dag_id = dag.id
                      AND NOT EXISTS (
                        SELECT FROM lineshaft.edge
                        LEFT JOIN lineshaft.task_live AS upstream ON upstream.id = edge.depends_on
                        WHERE edge.task_id = live.id AND NOT edge.satisfied AND (upstream.id IS NULL OR upstream.dag_id = dag.id)
                      )
                ),
                -- OFFSET 0: one look-up per step, whatever the planner's statistics are.
                above AS (
                    SELECT id FROM outward
                    UNION
                    SELECT next.id
                    FROM above
                    CROSS JOIN LATERAL (
                        SELECT edge.depends_on AS id FROM lineshaft.edge WHERE edge.task_id = above.id AND NOT edge.satisfied OFFSET 0
                    ) AS next
                ),
                stuck AS (
                    SELECT above.id FROM above WHERE NOT EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = above.id)
                    UNION
                    SELECT next.id
                    FROM stuck
                    CROSS JOIN LATERAL (
                        SELECT edge.task_id AS id FROM lineshaft.edge WHERE edge.depends_on = stuck.id AND NOT edge.satisfied OFFSET 0
                    ) AS next
                )
                SELECT id FROM outward EXCEPT SELECT id FROM stuck
            ) THEN 'failed'
            WHEN dag.status IN ('completed', 'failed', 'cancelled') THEN 'running'
            ELSE dag.status::text
        END::lineshaft.dag_status AS status
    FROM lineshaft.dag
    WHERE dag.id = ANY (%(dag_ids)s::text[])
),
changed AS (
    UPDATE lineshaft.dag
    SET status = verdict.status,
        ended_at = CASE WHEN verdict.status IN ('completed', 'failed', 'cancelled') THEN clock.now END
    FROM verdict, clock
    WHERE dag.id = verdict.id AND dag.status <> verdict.status
    RETURNING dag.id, dag.status
)
INSERT INTO lineshaft.event (at, kinds, dag_id)
SELECT clock.now, ARRAY['dag.' || changed.status::text], changed.id FROM changed CROSS JOIN clock

-- name: lock_dags_below
-- These DAGs, and those of all dependents of these tasks: their status may change too. Locked together in one order, before any of them is
-- written. All of them, not only those with a dead letter: one may just be getting its first.
WITH RECURSIVE below AS (
    SELECT unnest(%(ids)s::text[]) COLLATE "C" AS id
    UNION
    SELECT next.id
    FROM below
    CROSS JOIN LATERAL (
        SELECT edge.task_id AS id FROM lineshaft.edge WHERE edge.depends_on = below.id AND NOT edge.satisfied OFFSET 0
    ) AS next
)
SELECT dag.id
FROM lineshaft.dag
WHERE dag.id = ANY (ARRAY(
    SELECT live.dag_id FROM below JOIN lineshaft.task_live AS live ON live.id = below.id WHERE live.dag_id IS NOT NULL
    UNION
    SELECT unnest(%(dag_ids)s::text[])
))
ORDER BY dag.id
FOR NO KEY UPDATE

-- name: release_locks
SELECT count(*) FROM lineshaft.release_locks_1(%(keys)s::text[], %(holders)s::text[], NULL, NULL)

-- name: unblock_dependents
-- Follows a statement that ends tasks, in the same transaction. Only ended tasks count, so tasks that didn't move do no harm here; and
-- each edge is satisfied once. One row: thousands of tasks may have waited, and only batches whose children have all ended are of interest.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
satisfied AS (
    UPDATE lineshaft.edge
    SET satisfied = true
    WHERE edge.depends_on = ANY (%(ids)s::text[])
      AND NOT edge.satisfied
      -- (Not a join: planned while the table is empty, that might read the whole history later.)
      AND (SELECT upstream.status = 'COMPLETED' OR edge.kind = 'ended' FROM lineshaft.task_end AS upstream WHERE upstream.id = edge.depends_on)
    RETURNING edge.task_id
),
freed AS MATERIALIZED (SELECT task_id AS id, count(*)::integer AS n FROM satisfied GROUP BY task_id ORDER BY task_id),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET blocked = live.blocked - freed.n,
        status = CASE
            WHEN live.status = 'PENDING' AND live.blocked = freed.n AND NOT live.is_batch AND coalesce(live.due_at <= clock.now, true)
            THEN 'READY' ELSE live.status
        END::lineshaft.task_status,
        due_at = CASE
            -- A batch whose children have all ended waits for nothing, until finish_batches ends it in this transaction.
            WHEN live.status = 'PENDING' AND live.blocked = freed.n AND live.is_batch THEN clock.now
            WHEN live.due_at > clock.now THEN live.due_at
        END,
        ready_at = CASE
            WHEN live.blocked = freed.n AND coalesce(live.due_at <= clock.now, true) THEN coalesce(live.ready_at, clock.now)
            ELSE live.ready_at
        END,
        rank = lineshaft.rank(
            live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
        ),
        rekey_at = coalesce(lineshaft.rekey_at(live.deadline, clock.now), live.rekey_at),
        generation = (SELECT last_value FROM lineshaft.generation_no)
    FROM freed, lineshaft.lane, clock
    WHERE live.id = freed.id
      AND lane.id = live.lane_id
    RETURNING live.id, live.dag_id, live.lane_id, live.status, live.is_batch AND live.blocked = 0 AS batch_done
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id)
    SELECT clock.now, '{task.ready}', moved.id, moved.dag_id FROM moved CROSS JOIN clock WHERE moved.status = 'READY'
),
woken AS (
    SELECT
        -- include: notify_lanes
    FROM moved WHERE status = 'READY' HAVING count(*) > 0
)
SELECT ARRAY(SELECT moved.id FROM moved WHERE moved.batch_done) AS batches_done, (SELECT count(*) FROM woken) AS woken

-- name: free_keys
-- Cancelled and dead-lettered tasks give their idempotency key back: it expires, and the next submission takes it over. Until then the
-- content of the request is kept, in case the task is revived.
UPDATE lineshaft.task_key SET expires_at = timestamptz 'epoch' WHERE key = ANY (%(keys)s::text[]) AND task_id = ANY (%(task_ids)s::text[])

-- name: insert_dead_letters
INSERT INTO lineshaft.dead_letter (
    task_id, epoch, revival, dead_lettered_at, total_cost_usd, poison_pill, category, error, pattern
)
SELECT input.task_id, input.epoch, input.revival, coalesce(%(now)s::timestamptz, now()), input.cost, input.poison, input.category, input.error,
    input.pattern
FROM unnest(
    %(task_ids)s::text[], %(epochs)s::integer[], %(revivals)s::smallint[], %(costs)s::numeric[], %(poison)s::boolean[],
    %(categories)s::text[], %(errors)s::text[], %(patterns)s::text[]
) AS input (task_id, epoch, revival, cost, poison, category, error, pattern)

-- name: insert_events
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
SELECT coalesce(%(now)s::timestamptz, now()), input.kinds::text[], input.task_id, input.dag_id, input.agent_id, input.epoch, input.data
FROM unnest(
    %(kinds)s::text[], %(task_ids)s::text[], %(dag_ids)s::text[], %(agent_ids)s::text[], %(epochs)s::integer[], %(data)s::jsonb[]
) AS input (kinds, task_id, dag_id, agent_id, epoch, data)

-- name: free_probes
-- Probes without evidence: cancelled, released, rate-limited, over their budget, or waiting for children. Another task may be the probe.
WITH freed AS (
    UPDATE lineshaft.breaker SET probe_task_id = NULL
    WHERE state <> 'closed' AND probe_task_id = ANY (%(ids)s::text[])
    RETURNING key
)
SELECT pg_notify(lineshaft.channel(), '*') FROM freed HAVING count(*) > 0
