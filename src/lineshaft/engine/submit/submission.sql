-- These statements also run in callers' transactions.

-- name: raise_paths
-- New tasks lengthen the critical paths of existing tasks above them. Waiters are notified, because a claim skips these rows until the commit.
SELECT
    -- include: notify_lanes
FROM (
    SELECT lane_id FROM lineshaft.raise_paths_1(%(ids)s::text[], %(lengths)s::smallint[], coalesce(%(now)s::timestamptz, now())) AS lane_id
) AS moved
HAVING count(*) > 0

-- name: fair_tasks_exist
SELECT lineshaft.fair_tasks_exist_1()

-- name: full_queues
-- Before anything is written.
SELECT bounds, quota, key, most, waiting, added FROM lineshaft.full_queues_1(%(keys)s::text[], %(counts)s::bigint[])

-- name: read_clock
-- A bulk submission computes ranks in Python. Here and below the transaction gets its xid before it reads the generation number, so that
-- close_generations knows that it is going to write there.
SELECT
    coalesce(%(now)s::timestamptz, now()) AS now,
    (SELECT last_value FROM lineshaft.generation_no WHERE pg_current_xact_id() IS NOT NULL) AS generation
WHERE
    -- include: knows_types

-- name: insert_tasks
-- A few tasks in one statement; many are inserted by COPY.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
new AS MATERIALIZED (
    SELECT *
    FROM unnest(
        %(id)s::text[], %(dag_id)s::text[], %(live_dag_id)s::text[], %(parent_id)s::text[], %(idempotency_key)s::text[], %(type)s::text[],
        %(title)s::text[], %(preset)s::text[], %(spec)s::jsonb[], %(inputs)s::jsonb[], %(for_each)s::jsonb[], %(key)s::text[], %(required_capabilities)s::text[], %(model_preferences)s::text[],
        %(fallback_models)s::text[], %(max_cost_usd)s::numeric[], %(max_total_cost_usd)s::numeric[], %(lock_key)s::text[],
        %(admission)s::jsonb[], %(lock_owner)s::text[], %(retry)s::jsonb[], %(output_type)s::text[], %(gates)s::jsonb[], %(tags)s::text[], %(created_by)s::text[], %(created_by_token)s::text[],
        %(surface)s::jsonb[], %(deadline)s::timestamptz[], %(run_at)s::timestamptz[], %(priority_boost_per_minute)s::double precision[],
        %(max_duration_sec)s::double precision[], %(heartbeat_interval_sec)s::double precision[], %(priority)s::smallint[],
        %(max_attempts)s::smallint[], %(require_decision_report)s::boolean[], %(ignore_failure)s::boolean[], %(expire_at_deadline)s::boolean[], %(is_batch)s::boolean[],
        %(open_limits)s::smallint[], %(type_revision)s::integer[], %(lane_id)s::integer[], %(boost)s::double precision[], %(blocked)s::integer[], %(downstream)s::smallint[]
    ) WITH ORDINALITY AS new (
        id, dag_id, live_dag_id, parent_id, idempotency_key, type, title, preset, spec, inputs, for_each, key, required_capabilities, model_preferences,
        fallback_models, max_cost_usd, max_total_cost_usd, lock_key, admission, lock_owner, retry, output_type, gates, tags, created_by,
        created_by_token, surface, deadline, run_at, priority_boost_per_minute, max_duration_sec, heartbeat_interval_sec, priority, max_attempts,
        require_decision_report, ignore_failure, expire_at_deadline, is_batch, open_limits, type_revision, lane_id, boost, blocked, downstream, n
    )
    WHERE
        -- include: knows_types
),
stored AS (
    INSERT INTO lineshaft.task (
        id, dag_id, parent_id, idempotency_key, type, title, preset, spec, inputs, for_each, key, required_capabilities, model_preferences, fallback_models,
        max_cost_usd, max_total_cost_usd, lock_key, admission, retry, output_type, gates, tags, created_by, created_by_token, surface, deadline, run_at,
        priority_boost_per_minute, max_duration_sec, heartbeat_interval_sec, priority, max_attempts, require_decision_report,
        ignore_failure, expire_at_deadline, is_batch, open_limits, type_revision, created_at
    )
    SELECT
        id, dag_id, parent_id, idempotency_key, type, title, preset, spec, inputs, for_each, key, required_capabilities::text[], model_preferences::text[],
        fallback_models::text[], max_cost_usd, max_total_cost_usd, lock_key, admission, retry, output_type, gates, tags::text[], created_by, created_by_token, surface,
        deadline, run_at, priority_boost_per_minute, max_duration_sec, heartbeat_interval_sec, priority, max_attempts,
        require_decision_report, ignore_failure, expire_at_deadline, is_batch, open_limits, type_revision, clock.now
    FROM new CROSS JOIN clock
),
placed AS (
    INSERT INTO lineshaft.task_live (
        id, dag_id, status, lane_id, priority, downstream, blocked, deadline, rank, rekey_at, ready_at, due_at, generation, lock_key, admission,
        lock_owner, heartbeat_sec, limit_sec, is_batch, is_gated, expires, max_cost_usd, max_total_cost_usd, parked
    )
    SELECT
        id, live_dag_id,
        CASE WHEN blocked > 0 OR run_at > clock.now OR is_batch THEN 'PENDING' ELSE 'READY' END::lineshaft.task_status,
        lane_id, priority, downstream, blocked, deadline,
        lineshaft.rank(priority, downstream, boost, clock.now, deadline, clock.now),
        -- A deadline in the past is checked once more, to be reported as missed.
        coalesce(lineshaft.rekey_at(deadline, clock.now), deadline),
        CASE WHEN blocked > 0 OR run_at > clock.now OR is_batch THEN NULL ELSE clock.now END,
        CASE
            WHEN run_at > clock.now THEN run_at
            -- A list that exists already, because another call has submitted its task, is opened by the promoter.
            WHEN is_batch AND blocked = 0 THEN clock.now
        END,
        (SELECT last_value FROM lineshaft.generation_no WHERE pg_current_xact_id() IS NOT NULL),
        lineshaft.first_lock_1(lock_key, admission), admission, lock_owner, heartbeat_interval_sec, max_duration_sec, is_batch, gates IS NOT NULL OR require_decision_report,
        expire_at_deadline, max_cost_usd, max_total_cost_usd, CASE WHEN admission ? 'fair' THEN 'fair' END
    FROM new CROSS JOIN clock
    ORDER BY n
    RETURNING id, dag_id, status, lane_id, submission_no
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id)
    SELECT clock.now,
        CASE WHEN placed.status = 'READY' THEN '{task.created,task.ready}' ELSE '{task.created}' END::text[],
        placed.id, placed.dag_id
    FROM placed CROSS JOIN clock
    ORDER BY placed.submission_no
)
SELECT
-- include: notify_lanes
FROM placed WHERE status = 'READY' HAVING count(*) > 0

-- name: insert_task
-- One standalone task: half the work of insert_tasks, because columns are values, not arrays.
WITH stored AS (
    INSERT INTO lineshaft.task (
        id, dag_id, type, title, preset, spec, required_capabilities, model_preferences, fallback_models, max_cost_usd, max_total_cost_usd,
        lock_key, admission, retry, output_type, gates, tags, created_by, created_by_token, surface, deadline, run_at, priority_boost_per_minute,
        max_duration_sec, heartbeat_interval_sec, priority, max_attempts, require_decision_report, expire_at_deadline, open_limits, type_revision,
        created_at
    )
    VALUES (
        %(id)s::text, %(dag_id)s::text, %(type)s::text, %(title)s::text, %(preset)s::text, %(spec)s::jsonb,
        %(required_capabilities)s::text[], %(model_preferences)s::text[], %(fallback_models)s::text[], %(max_cost_usd)s::numeric,
        %(max_total_cost_usd)s::numeric, %(lock_key)s::text, %(admission)s::jsonb, %(retry)s::jsonb, %(output_type)s::text, %(gates)s::jsonb, %(tags)s::text[],
        %(created_by)s::text, %(created_by_token)s::text, %(surface)s::jsonb, %(deadline)s::timestamptz, %(run_at)s::timestamptz,
        %(priority_boost_per_minute)s::double precision, %(max_duration_sec)s::double precision,
        %(heartbeat_interval_sec)s::double precision, %(priority)s::smallint, %(max_attempts)s::smallint,
        %(require_decision_report)s::boolean, %(expire_at_deadline)s::boolean, %(open_limits)s::smallint, %(type_revision)s::integer,
        coalesce(%(now)s::timestamptz, now())
    )
),
placed AS (
    INSERT INTO lineshaft.task_live (
        id, status, lane_id, priority, deadline, rank, rekey_at, ready_at, due_at, generation, lock_key, admission, heartbeat_sec, limit_sec, is_gated,
        expires, max_cost_usd, max_total_cost_usd, parked
    )
    SELECT
        %(id)s::text, CASE WHEN waits THEN 'PENDING' ELSE 'READY' END::lineshaft.task_status, %(lane_id)s::integer, %(priority)s::smallint,
        %(deadline)s::timestamptz,
        lineshaft.rank(
            %(priority)s::smallint, 0::smallint, %(boost)s::double precision, now, %(deadline)s::timestamptz, now
        ),
        coalesce(lineshaft.rekey_at(%(deadline)s::timestamptz, now), %(deadline)s::timestamptz),
        CASE WHEN NOT waits THEN now END, CASE WHEN waits THEN %(run_at)s::timestamptz END,
        (SELECT last_value FROM lineshaft.generation_no WHERE pg_current_xact_id() IS NOT NULL), lineshaft.first_lock_1(%(lock_key)s::text, %(admission)s::jsonb), %(admission)s::jsonb, %(heartbeat_interval_sec)s::double precision,
        %(max_duration_sec)s::double precision, %(gates)s::jsonb IS NOT NULL OR %(require_decision_report)s::boolean,
        %(expire_at_deadline)s::boolean, %(max_cost_usd)s::numeric, %(max_total_cost_usd)s::numeric,
        CASE WHEN %(admission)s::jsonb ? 'fair' THEN 'fair' END
    FROM (
        SELECT
            coalesce(%(now)s::timestamptz, now()) AS now,
            coalesce(%(run_at)s::timestamptz > coalesce(%(now)s::timestamptz, now()), false) AS waits
    ) AS clock
    WHERE
        -- include: knows_types
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id)
    VALUES (
        coalesce(%(now)s::timestamptz, now()),
        CASE
            WHEN %(run_at)s::timestamptz > coalesce(%(now)s::timestamptz, now()) THEN '{task.created}'
            ELSE '{task.created,task.ready}'
        END::text[],
        %(id)s::text
    )
)
SELECT CASE
    WHEN current_setting('lineshaft.wakeups', true) = 'redis' THEN lineshaft.report_lanes_1(ARRAY[%(lane_id)s::integer])
    ELSE pg_notify(lineshaft.channel(), %(lane_id)s::integer::text)
END
WHERE (%(run_at)s::timestamptz > coalesce(%(now)s::timestamptz, now())) IS NOT TRUE
