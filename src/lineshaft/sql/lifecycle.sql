-- What happens to a claimed task until it ends. Used by store/lifecycle.py.
--
-- Every statement takes arrays and moves a batch. A row moves only if its status and epoch are as expected; what didn't move is
-- missing from the answer, and Python finds out why.

-- name: lock_dependents
-- Comes before whatever ends tasks. If anything waits for them, they and what waits are locked together in the order of their ids, so
-- that two transitions that meet on neighbours of a DAG wait for each other instead of deadlocking. Tasks that nobody waits for,
-- most of them, cost one index look-up each.
WITH waiting AS MATERIALIZED (
    SELECT edge.task_id AS id FROM lineshaft.edge WHERE edge.depends_on = ANY (%(ids)s::text[]) AND NOT edge.satisfied
)
SELECT live.id
FROM lineshaft.task_live AS live
WHERE live.id = ANY (ARRAY(
    SELECT id FROM waiting
    UNION
    SELECT unnest(%(ids)s::text[]) WHERE EXISTS (SELECT FROM waiting)
))
ORDER BY live.id
FOR UPDATE

-- name: complete_tasks
-- RUNNING → VALIDATING → COMPLETED in one go, for tasks without a gate that must run elsewhere; also VALIDATING → COMPLETED. The live
-- row goes, the end row comes. What waits for these tasks is moved by unblock_dependents, in the same transaction but under a
-- newer snapshot: an edge that was added while this waited for a row must not be missed.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
input AS MATERIALIZED (
    SELECT *
    FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(outputs)s::jsonb[], %(artifacts)s::jsonb[], %(reports)s::jsonb[],
        %(output_types)s::text[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[]
    ) AS input (id, epoch, output, artifacts, report, output_type, cost, tokens_in, tokens_out)
),
gone AS (
    DELETE FROM lineshaft.task_live AS live
    USING input
    WHERE live.id = input.id
      AND live.epoch = input.epoch
      -- Out of VALIDATING only once the gates have accepted it: handing in again is no way past them.
      AND CASE WHEN %(accepted)s::boolean THEN live.status = 'VALIDATING' ELSE live.status = 'RUNNING' AND NOT live.is_gated END
      -- More than the task may cost is not accepted (R-235).
      AND (
        coalesce(input.cost, live.attempt_cost_usd) <= live.reserved_usd
        OR live.agent_id IS NULL
        OR (SELECT lane.max_cost_usd IS NULL FROM lineshaft.lane WHERE lane.id = live.lane_id)
      )
    RETURNING live.id, live.epoch, live.dag_id, live.status, live.lane_id, live.lock_key, live.ready_at, live.claimed_at, live.started_at,
        live.first_started_at, live.attempts, live.revivals, live.agent_id, live.model, live.cost_usd, live.tokens_input, live.tokens_output,
        live.reserved_usd, input.output, input.artifacts, input.report, input.output_type,
        coalesce(input.cost, live.attempt_cost_usd) AS actual, input.tokens_in, input.tokens_out
),
ended AS (
    INSERT INTO lineshaft.task_end (
        id, status, epoch, ended_at, ready_at, claimed_at, started_at, first_started_at, attempts, revivals, agent_id, model,
        cost_usd, tokens_input, tokens_output, output, artifacts, decision_report, output_type
    )
    SELECT
        gone.id, 'COMPLETED', gone.epoch, clock.now, gone.ready_at, gone.claimed_at, gone.started_at, gone.first_started_at, gone.attempts,
        gone.revivals, gone.agent_id, gone.model, gone.cost_usd + gone.actual,
        gone.tokens_input + coalesce(gone.tokens_in, 0), gone.tokens_output + coalesce(gone.tokens_out, 0),
        gone.output, gone.artifacts, gone.report, gone.output_type
    FROM gone CROSS JOIN clock
),
settled AS (
    UPDATE lineshaft.agent
    SET held = held - share.n, reserved_usd = reserved_usd - share.reserved, spent_usd = spent_usd + share.actual,
        spent_on_day_usd = CASE WHEN spend_day >= share.today THEN spent_on_day_usd ELSE 0 END + share.actual,
        spend_day = greatest(spend_day, share.today)
    FROM (
        SELECT (SELECT (now AT TIME ZONE 'UTC')::date FROM clock) AS today, agent_id, count(*) AS n, sum(reserved_usd) AS reserved, sum(actual) AS actual
        FROM gone WHERE agent_id IS NOT NULL GROUP BY agent_id ORDER BY agent_id
    ) AS share
    WHERE agent.id = share.agent_id
    RETURNING agent.id
),
-- The counts make the order: agents, locks, DAGs, the same as in claims.
lock_released AS (
    DELETE FROM lineshaft.lock
    USING gone
    WHERE lock.key = gone.lock_key AND lock.holder_task_id = gone.id AND gone.lock_key IS NOT NULL AND (SELECT count(*) FROM settled) >= 0
    RETURNING lock.key
),
dag_moved AS (
    UPDATE lineshaft.dag
    SET completed = dag.completed + share.n,
        reserved_usd = dag.reserved_usd - share.reserved,
        spent_usd = dag.spent_usd + share.actual,
        status = CASE
            WHEN dag.completed + share.n + dag.cancelled = dag.total THEN 'completed' ELSE dag.status
        END::lineshaft.dag_status,
        ended_at = CASE WHEN dag.completed + share.n + dag.cancelled = dag.total THEN clock.now ELSE dag.ended_at END
    FROM (
        -- A gate that ran elsewhere gave the money back when it began: only what an agent still held is settled here.
        SELECT dag_id, count(*) AS n, sum(reserved_usd) AS reserved, coalesce(sum(actual) FILTER (WHERE agent_id IS NOT NULL), 0) AS actual
        FROM gone WHERE dag_id IS NOT NULL GROUP BY dag_id ORDER BY dag_id
    ) AS share, clock
    WHERE dag.id = share.dag_id AND (SELECT count(*) FROM lock_released) >= 0
    RETURNING dag.id, dag.status, dag.dead_lettered, share.reserved
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
    SELECT clock.now,
        CASE WHEN gone.status = 'RUNNING' THEN '{task.validating,task.completed}' ELSE '{task.completed}' END::text[],
        gone.id, gone.dag_id, gone.agent_id, gone.epoch
    FROM gone CROSS JOIN clock
),
dag_logged AS (
    INSERT INTO lineshaft.event (at, kinds, dag_id)
    SELECT clock.now, '{dag.completed}', dag_moved.id FROM dag_moved CROSS JOIN clock WHERE dag_moved.status = 'completed'
),
troubled AS MATERIALIZED (
    SELECT key, state, probe_task_id FROM lineshaft.breaker WHERE state <> 'closed' OR failures > 0
)
SELECT
    gone.id, gone.dag_id,
    -- Whoever called looks after these: a DAG with a dead letter or with money that was freed, and locks that others wait for.
    gone.dag_id IN (SELECT id FROM dag_moved WHERE dead_lettered > 0 OR reserved > 0) AS dag_needs_care,
    gone.lock_key IN (SELECT key FROM lock_released) AS lock_released,
    gone.lock_key,
    -- Breakers that have failures to forget, or wait for this very task; NULL while all goes well.
    CASE
        WHEN EXISTS (SELECT FROM troubled) THEN ARRAY(
            SELECT troubled.key
            FROM troubled
            WHERE (troubled.state = 'closed' OR troubled.probe_task_id = gone.id)
              AND troubled.key IN ((SELECT lane.type FROM lineshaft.lane WHERE lane.id = gone.lane_id), 'model:' || gone.model)
        )
    END AS breakers
FROM gone

-- name: unblock_dependents
-- Follows whatever ends tasks, in the same transaction. Only ends count, so tasks that didn't move do no harm here; and each edge
-- counts down once.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
satisfied AS (
    UPDATE lineshaft.edge
    SET satisfied = true
    WHERE edge.depends_on = ANY (%(ids)s::text[])
      AND NOT edge.satisfied
      -- (Not a join: planned while the table is empty, that might read all of the history ever after.)
      AND (SELECT upstream.status = 'COMPLETED' OR edge.kind = 'ended' FROM lineshaft.task_end AS upstream WHERE upstream.id = edge.depends_on)
    RETURNING edge.task_id
),
freed AS MATERIALIZED (
    SELECT task_id AS id, count(*)::integer AS n FROM satisfied GROUP BY task_id ORDER BY task_id
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET blocked = live.blocked - freed.n,
        status = CASE
            WHEN live.status = 'PENDING' AND live.blocked = freed.n AND NOT live.is_batch AND coalesce(live.due_at <= clock.now, true)
            THEN 'READY' ELSE live.status
        END::lineshaft.task_status,
        due_at = CASE
            -- A batch whose children are all done waits for nothing, until finish_batches ends it in this transaction.
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
    SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END) FROM moved WHERE status = 'READY' HAVING count(*) > 0
)
SELECT moved.id, moved.batch_done, (SELECT count(*) FROM woken) AS notified FROM moved

-- The statements below are small and put together by Python: lock the tasks and read all that decides, decide, then send the changes
-- in one pipeline. Only claim and complete are worth a statement of their own.

-- name: lock_tasks
-- All that decides what becomes of a task, in the one order in which rows of tasks are locked.
SELECT
    live.id, live.epoch, live.status::text AS status, live.dag_id, live.agent_id, live.reserved_usd, live.cost_usd, live.attempt_cost_usd,
    live.tokens_input, live.tokens_output, live.attempts, live.rate_limits, live.revivals, live.claimed_at, live.started_at,
    live.first_started_at, live.ready_at, live.lease_until, live.limit_at, live.lock_key, live.lock_owner, live.lane_id, live.model, live.is_batch,
    live.blocked, live.progress, live.is_gated, task.type, task.title, task.parent_id, task.dag_id AS task_dag_id, task.preset, task.retry,
    task.max_attempts, task.max_cost_usd, task.max_total_cost_usd, task.required_capabilities, task.model_preferences,
    task.fallback_models, task.priority_boost_per_minute, task.gates, task.require_decision_report, task.idempotency_key,
    coalesce(live.heartbeat_sec, 30) AS heartbeat_sec
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = ANY (%(ids)s::text[])
ORDER BY live.id
FOR UPDATE OF live

-- name: read_ends
-- Tasks that are not live: how they ended, and by which claim.
SELECT id, epoch, status::text AS status, reason, category, agent_id FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])

-- name: failed_agents
-- Who failed at these tasks since they were last revived (poison pills, model/retry.py).
SELECT attempt.task_id, array_agg(DISTINCT attempt.agent_id) AS agents
FROM lineshaft.attempt
JOIN unnest(%(ids)s::text[], %(revivals)s::smallint[]) AS wanted (id, revival)
  ON attempt.task_id = wanted.id AND attempt.revival = wanted.revival
-- One that is being validated is the one that fails now: its agent has let go of the task, but it was that one's output.
WHERE attempt.outcome IN ('failed', 'validating')
GROUP BY attempt.task_id

-- name: start_tasks
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
started AS (
    UPDATE lineshaft.task_live AS live
    SET status = 'RUNNING', started_at = clock.now, first_started_at = coalesce(live.first_started_at, clock.now), heartbeat_at = clock.now,
        limit_at = clock.now + make_interval(secs => live.limit_sec),
        lease_until = clock.now + make_interval(secs => least(3 * coalesce(live.heartbeat_sec, agent.heartbeat_interval_sec), live.limit_sec))
    FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch), lineshaft.agent, clock
    WHERE live.id = input.id AND live.epoch = input.epoch AND live.status = 'CLAIMED' AND agent.id = live.agent_id
    RETURNING live.id, live.dag_id, live.agent_id, live.epoch
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
    SELECT clock.now, '{task.started}', started.id, started.dag_id, started.agent_id, started.epoch FROM started CROSS JOIN clock
)
SELECT id FROM started

-- name: heartbeat
-- One statement for all tasks of an agent's process. Liveness is the lease; what the agent reports is kept beside it. A task that
-- is missing from the answer is no longer held.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
input AS MATERIALIZED (
    SELECT * FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(progress)s::jsonb[], %(costs)s::numeric[]
    ) AS input (id, epoch, progress, cost)
),
own AS MATERIALIZED (
    SELECT heartbeat_interval_sec AS interval_sec FROM lineshaft.agent WHERE id = %(agent_id)s::text
),
beat AS (
    UPDATE lineshaft.task_live AS live
    SET heartbeat_at = clock.now,
        lease_until = least(
            clock.now + make_interval(secs => 3 * coalesce(live.heartbeat_sec, (SELECT interval_sec FROM own))), live.limit_at
        ),
        progress = coalesce(input.progress, live.progress),
        -- What it has cost so far only grows: a late heartbeat must not take money back.
        attempt_cost_usd = greatest(live.attempt_cost_usd, coalesce(input.cost, 0))
    FROM input, clock
    WHERE live.id = input.id AND live.epoch = input.epoch AND live.status IN ('RUNNING', 'VALIDATING') AND live.agent_id = %(agent_id)s::text
    RETURNING live.id, live.dag_id, live.epoch, live.lock_key, live.lock_owner, live.heartbeat_sec, input.progress, live.attempt_cost_usd,
        live.reserved_usd
),
renewed AS (
    UPDATE lineshaft.lock
    SET expires_at = clock.now + make_interval(secs => greatest(
        %(lock_ttl)s::double precision, 3 * coalesce(beat.heartbeat_sec, (SELECT interval_sec FROM own))
    ))
    FROM beat, clock
    WHERE lock.key = beat.lock_key AND lock.holder_task_id = coalesce(beat.lock_owner, beat.id)
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
    SELECT clock.now, '{task.progress}', beat.id, beat.dag_id, %(agent_id)s::text, beat.epoch, beat.progress
    FROM beat CROSS JOIN clock WHERE beat.progress IS NOT NULL
)
SELECT id, attempt_cost_usd, reserved_usd FROM beat

-- name: touch_agent
UPDATE lineshaft.agent
SET last_heartbeat = coalesce(%(now)s::timestamptz, now()),
    status = CASE WHEN status = 'offline' THEN 'active' ELSE status END::lineshaft.agent_status
WHERE id = %(agent_id)s::text AND incarnation = %(incarnation)s::bigint
RETURNING status::text

-- name: requeue_tasks
-- Out of the agent's hands without ending: RETRYING after a failure or a rate limit, READY after a release, PENDING after a snooze or
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
    attempts = input.attempts, rate_limits = input.rate_limits, blocked = live.blocked + input.blocked,
    cost_usd = live.cost_usd + input.cost,
    tokens_input = live.tokens_input + input.tokens_in, tokens_output = live.tokens_output + input.tokens_out,
    last_category = coalesce(input.category, live.last_category),
    attempt_cost_usd = 0, reserved_usd = 0, agent_id = NULL, model = NULL, lease_until = NULL, limit_at = NULL, started_at = NULL,
    claimed_at = NULL, heartbeat_at = NULL, progress = NULL, parked = NULL
FROM unnest(
        %(ids)s::text[], %(statuses)s::text[], %(delays)s::double precision[], %(lane_ids)s::integer[], %(attempts)s::smallint[],
        %(rate_limits)s::smallint[], %(blocked)s::integer[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[],
        %(categories)s::text[]
    ) AS input (id, status, delay, lane_id, attempts, rate_limits, blocked, cost, tokens_in, tokens_out, category),
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
)
INSERT INTO lineshaft.task_end (
    id, status, epoch, ended_at, ready_at, claimed_at, started_at, first_started_at, attempts, revivals, agent_id, model, cost_usd,
    tokens_input, tokens_output, reason, category, output
)
SELECT
    id, end_status::lineshaft.task_status, epoch, coalesce(%(now)s::timestamptz, now()), ready_at, claimed_at, started_at,
    first_started_at, end_attempts, revivals, agent_id, model, cost_usd + cost, tokens_input + tokens_in, tokens_output + tokens_out,
    reason, category, output
FROM gone

-- name: record_attempts
-- How a claim ended; one that was being validated has its row already.
INSERT INTO lineshaft.attempt (
    task_id, epoch, number, revival, agent_id, model, claimed_at, started_at, ended_at, outcome, category, error, cost_usd, tokens_input,
    tokens_output
)
SELECT
    input.task_id, input.epoch, input.number, input.revival, input.agent_id, input.model, coalesce(input.claimed_at, clock.now), input.started_at,
    clock.now, input.outcome, input.category, input.error, input.cost, input.tokens_in, input.tokens_out
FROM unnest(
        %(task_ids)s::text[], %(epochs)s::integer[], %(numbers)s::smallint[], %(revivals)s::smallint[], %(agent_ids)s::text[],
        %(models)s::text[], %(claimed_at)s::timestamptz[], %(started_at)s::timestamptz[], %(outcomes)s::text[], %(categories)s::text[],
        %(errors)s::text[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[]
    ) AS input (
        task_id, epoch, number, revival, agent_id, model, claimed_at, started_at, outcome, category, error, cost, tokens_in, tokens_out
    ),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ON CONFLICT (task_id, epoch) DO UPDATE
    SET outcome = excluded.outcome, category = excluded.category, error = excluded.error, ended_at = excluded.ended_at,
        gate = NULL, gate_due_at = NULL,
        -- What was booked when the output was handed in, or by a gate since, stays.
        cost_usd = greatest(attempt.cost_usd, excluded.cost_usd),
        tokens_input = greatest(attempt.tokens_input, excluded.tokens_input),
        tokens_output = greatest(attempt.tokens_output, excluded.tokens_output)

-- name: hand_in
-- RUNNING → VALIDATING: the output is safe with the attempt from now on. Its agent holds the task until a gate runs elsewhere (gates.sql).
WITH kept AS (
    INSERT INTO lineshaft.attempt (
        task_id, epoch, number, revival, agent_id, model, claimed_at, started_at, outcome, cost_usd, tokens_input, tokens_output, output
    )
    SELECT live.id, live.epoch, live.attempts + 1, live.revivals, live.agent_id, live.model, live.claimed_at, live.started_at, 'validating',
        input.cost, input.tokens_in, input.tokens_out, input.output
    FROM lineshaft.task_live AS live
    JOIN unnest(
        %(ids)s::text[], %(costs)s::numeric[], %(tokens_in)s::bigint[], %(tokens_out)s::bigint[], %(outputs)s::jsonb[]
    ) AS input (id, cost, tokens_in, tokens_out, output) ON input.id = live.id
    RETURNING task_id, cost_usd, tokens_input, tokens_output
)
UPDATE lineshaft.task_live AS live
SET status = 'VALIDATING', attempt_cost_usd = kept.cost_usd,
    tokens_input = live.tokens_input + kept.tokens_input, tokens_output = live.tokens_output + kept.tokens_output
FROM kept
WHERE live.id = kept.task_id

-- name: settle_agents
UPDATE lineshaft.agent
SET held = held - share.n, reserved_usd = agent.reserved_usd - share.reserved, spent_usd = spent_usd + share.actual,
    spent_on_day_usd = CASE WHEN spend_day >= clock.today THEN spent_on_day_usd ELSE 0 END + share.actual,
    spend_day = greatest(spend_day, clock.today)
FROM unnest(%(agent_ids)s::text[], %(counts)s::integer[], %(reserved)s::numeric[], %(actual)s::numeric[]) AS share (id, n, reserved, actual),
    (SELECT (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date AS today) AS clock
WHERE agent.id = share.id

-- name: settle_dags
UPDATE lineshaft.dag
SET reserved_usd = dag.reserved_usd - share.reserved, spent_usd = dag.spent_usd + share.actual, total = dag.total + share.added,
    completed = dag.completed + share.completed, cancelled = dag.cancelled + share.cancelled, dead_lettered = dag.dead_lettered + share.dead
FROM unnest(
    %(dag_ids)s::text[], %(reserved)s::numeric[], %(actual)s::numeric[], %(added)s::integer[], %(completed)s::integer[],
    %(cancelled)s::integer[], %(dead)s::integer[]
) AS share (id, reserved, actual, added, completed, cancelled, dead)
WHERE dag.id = share.id

-- name: judge_dags
-- A DAG's status, worked out from its counters and from what can still run; called while its row is locked, so of two transactions that
-- end its last tasks the second sees what the first did. Writes, and tells, only a change.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
verdict AS MATERIALIZED (
    SELECT dag.id,
        CASE
            WHEN dag.completed + dag.cancelled + dag.dead_lettered = dag.total THEN CASE
                WHEN dag.dead_lettered > 0 THEN 'failed'
                WHEN dag.cancelled = dag.total THEN 'cancelled'
                ELSE 'completed'
            END
            WHEN dag.dead_lettered > 0 AND NOT EXISTS (
                -- Can anything still run? Whatever waits for nothing ...
                SELECT FROM lineshaft.task
                JOIN lineshaft.task_live AS live ON live.id = task.id
                WHERE task.dag_id = dag.id AND (live.status <> 'PENDING' OR live.blocked = 0)
                OFFSET 0
            ) AND NOT EXISTS (
                -- ... or waits only for tasks of other DAGs, none of which, directly or not, waits for one that has ended badly. (What
                -- waits for a task of this DAG need not be looked at: that one would have to run before.)
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
                -- OFFSET 0: one look-up a step, whatever the planner thinks of a table that it knows nothing about.
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
-- These DAGs, and those of whatever waits for these tasks, directly or through others: their verdict may change too. Locked together in
-- one order, before any of them is written. All of them, not only those with a dead letter: one may just be getting its first.
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
-- Only the holder's own: a lock that expired and was granted to another stays with that one.
DELETE FROM lineshaft.lock
USING unnest(%(keys)s::text[], %(holders)s::text[]) AS held (key, holder)
WHERE lock.key = held.key AND lock.holder_task_id = held.holder

-- name: unpark_lock_waiters
-- The best waiter of each lane comes back into the claims' sight; under a snapshot that is newer than the release, so that one who was
-- parked while the release waited is not forgotten.
WITH RECURSIVE waiting AS MATERIALIZED (
    SELECT free.key, first.lane_id, first.id
    FROM unnest(%(keys)s::text[]) AS free (key)
    CROSS JOIN LATERAL (
        SELECT lane_id, id FROM lineshaft.task_live
        WHERE status = 'READY' AND lock_key = free.key AND parked = 'lock'
        ORDER BY lane_id, rank, submission_no
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT waiting.key, next.lane_id, next.id
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT lane_id, id FROM lineshaft.task_live
        WHERE status = 'READY' AND lock_key = waiting.key AND lane_id > waiting.lane_id AND parked = 'lock'
        ORDER BY lane_id, rank, submission_no
        LIMIT 1
    ) AS next
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET parked = NULL, generation = (SELECT last_value FROM lineshaft.generation_no)
    WHERE live.id = ANY (ARRAY(SELECT id FROM waiting)) AND live.parked = 'lock'
      AND (SELECT true FROM lineshaft.lock WHERE lock.key = live.lock_key) IS NULL
    RETURNING live.lane_id
)
SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END) FROM moved HAVING count(*) > 0

-- name: unpark_budget_waiters
-- READY tasks of DAGs that have money again, best first while the sum fits.
WITH fitting AS MATERIALIZED (
    SELECT waiting.id
    FROM (
        SELECT live.id, dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd AS money,
            sum(coalesce(lane.max_cost_usd, 0)) OVER (PARTITION BY live.dag_id ORDER BY live.rank, live.submission_no) AS needed
        FROM lineshaft.dag
        CROSS JOIN LATERAL (
            SELECT id, dag_id, lane_id, rank, submission_no FROM lineshaft.task_live
            WHERE parked = 'dag_budget' AND task_live.dag_id = dag.id
            OFFSET 0
        ) AS live
        JOIN lineshaft.lane ON lane.id = live.lane_id
        WHERE dag.id = ANY (%(dag_ids)s::text[])
          -- One that is still too dear holds up nobody.
          AND (dag.budget_ceiling_usd IS NULL OR dag.spent_usd + dag.reserved_usd + coalesce(lane.max_cost_usd, 0) <= dag.budget_ceiling_usd)
    ) AS waiting
    WHERE waiting.money IS NULL OR waiting.needed <= waiting.money
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET parked = NULL, budget_told = false, generation = (SELECT last_value FROM lineshaft.generation_no)
    WHERE live.id = ANY (ARRAY(SELECT id FROM fitting))
      -- In words that no index knows: it is to be found by its id.
      AND live.parked || '' = 'dag_budget'
    RETURNING live.lane_id
)
SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END) FROM moved HAVING count(*) > 0

-- name: free_keys
-- Cancelled and dead-lettered tasks give their idempotency key back (U8): it has run out, and whoever asks for it next takes it over. Until
-- then what was asked with it is still known, should the task be revived.
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

-- name: wake_ready
-- Tasks that were just made READY by requeue_tasks.
SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END)
FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[]) AND status = 'READY' HAVING count(*) > 0

-- name: children
SELECT id, parent_id FROM lineshaft.task WHERE parent_id = ANY (%(ids)s::text[])

-- name: batch_outputs
-- What a batch parent's output is made of: its children's. Each waits for the one listed before it, which gives their order.
SELECT child.parent_id, child.id, ended.output,
    ARRAY(SELECT before.depends_on FROM lineshaft.edge AS before WHERE before.task_id = child.id) AS after
FROM lineshaft.edge
JOIN lineshaft.task AS child ON child.id = edge.depends_on AND child.parent_id = edge.task_id
JOIN lineshaft.task_end AS ended ON ended.id = child.id
WHERE edge.task_id = ANY (%(ids)s::text[])

-- name: save_step
-- Fenced by the claim. A step that is recorded already keeps its first result.
INSERT INTO lineshaft.step (task_id, name, epoch, recorded_at, cost_usd, data)
SELECT live.id, %(name)s::text, live.epoch, coalesce(%(now)s::timestamptz, now()), %(cost)s::numeric, %(data)s::jsonb
FROM lineshaft.task_live AS live
WHERE live.id = %(id)s::text AND live.epoch = %(epoch)s::integer AND live.status = 'RUNNING'
FOR KEY SHARE OF live
ON CONFLICT (task_id, name) DO UPDATE SET name = excluded.name
RETURNING data, epoch

-- name: save_checkpoint
INSERT INTO lineshaft.checkpoint (task_id, epoch, recorded_at, data)
SELECT live.id, live.epoch, coalesce(%(now)s::timestamptz, now()), %(data)s::jsonb
FROM lineshaft.task_live AS live
WHERE live.id = %(id)s::text AND live.epoch = %(epoch)s::integer AND live.status IN ('CLAIMED', 'RUNNING')
FOR KEY SHARE OF live
ON CONFLICT (task_id) DO UPDATE SET data = excluded.data, epoch = excluded.epoch, recorded_at = excluded.recorded_at
RETURNING task_id

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

-- name: dag_runs
-- A virtual DAG that becomes real while its task runs.
UPDATE lineshaft.dag
SET status = 'running', reserved_usd = %(reserved)s::numeric, spent_usd = %(spent)s::numeric
WHERE id = %(id)s::text

-- name: read_live
SELECT id, epoch, status::text FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[])

-- name: log_late_result
-- What a superseded claim wanted to hand in: refused, but kept for people to look at (R-100).
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, epoch, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{task.late_result}', task.id, task.dag_id, %(epoch)s::integer,
    jsonb_build_object('output', %(output)s::jsonb)
FROM lineshaft.task WHERE task.id = %(id)s::text
