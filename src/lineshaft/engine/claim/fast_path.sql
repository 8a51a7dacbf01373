-- claim_tasks in short, for tasks that need no lock and no money, as most of a big fleet's: a third of the work for the server.

-- name: claim_fast
-- Nothing to weigh: no lock to take, no money to count, no model or type to leave out. If one of the best tasks needs more than that,
-- nothing is claimed and `weigh` is true: claim_tasks must decide.
-- Without a lock: an agent that finds nothing waits for no row, and writes nothing.
WITH RECURSIVE seen AS MATERIALIZED (
    SELECT
        capabilities, types, models_available, claim_ttl_sec,
        coalesce(%(now)s::timestamptz, clock_timestamp()) AS now,
        greatest(least(%(limit)s::integer, coalesce(set_max_tasks, max_concurrent_tasks) - held), 0) AS room,
        limits.default_max_cost_usd, limits.quota_kinds, limits.quota_lanes
    FROM lineshaft.instance
    CROSS JOIN lineshaft.limits
    WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND status = 'active' AND set_status IS NULL
      AND (SELECT lineshaft.is_writable_1())
      AND (SELECT budget_usd IS NULL FROM lineshaft.agent WHERE id = %(agent_id)s::text)
      AND limits.daily_budget_usd IS NULL
      -- Accounts, fair shares, and quotas that may concern any task, are for claim_tasks.
      AND instance.accounts = '{}' AND limits.quota_kinds & 80 = 0
      AND (limits.quota_kinds & 8 = 0 OR NOT CASE
        WHEN limits.quota_lanes IS NULL THEN EXISTS (SELECT FROM lineshaft.quotas_of_1(ARRAY['agent:' || %(agent_id)s::text]))
        ELSE 'agent:' || %(agent_id)s::text LIKE ANY (limits.quota_lanes)
      END)
      AND NOT EXISTS (SELECT FROM lineshaft.slowdown WHERE until > coalesce(%(now)s::timestamptz, now()))
      AND NOT EXISTS (SELECT FROM lineshaft.breaker WHERE state <> 'closed')
      AND NOT EXISTS (SELECT FROM lineshaft.pause)
),
-- Down to `quota` as in claim_tasks.
clock AS MATERIALIZED (SELECT now, lineshaft.minutes(now) AS minutes FROM seen),
search AS NOT MATERIALIZED (SELECT types FROM seen WHERE room > 0),
few AS MATERIALIZED (
    -- include: few_lanes
),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation WHERE (SELECT ids IS NULL FROM few)),
waiting AS (
    -- include: waiting_lanes
),
head AS MATERIALIZED (
    SELECT
        found.lane_id AS id, found.generation, lane.boost_per_minute * (SELECT minutes FROM clock) AS aged,
        chosen.model,
        round((found.rank - lane.boost_per_minute * (SELECT minutes FROM clock)) * 1e6) AS effective,
        found.submission_no, seen.room AS most,
        lineshaft.lane_has_quota_1(seen.quota_kinds, seen.quota_lanes, lane.type, chosen.model) AS has_quota
    FROM seen
    CROSS JOIN (
        SELECT generation, lane_id, rank, submission_no FROM waiting
        UNION ALL
        (
            -- include: heads_of_few_lanes
        )
    ) AS found
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = found.lane_id OFFSET 0) AS lane
    CROSS JOIN LATERAL (SELECT lineshaft.chosen_model_1(lane.models, seen.models_available, '{}') AS model OFFSET 0) AS chosen
    WHERE seen.room > 0
      AND lineshaft.suits_1(lane.type, lane.required_capabilities, lane.models, seen.types, seen.capabilities, seen.models_available)
      AND (%(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[]))
),
-- Locked before the tasks: two claims of one instance wait for each other instead of both taking its last slot.
me AS MATERIALIZED (
    SELECT version, claim_ttl_sec, heartbeat_interval_sec, (SELECT now FROM clock) AS now,
        greatest(least(%(limit)s::integer, coalesce(set_max_tasks, max_concurrent_tasks) - held), 0) AS room
    FROM lineshaft.instance
    WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND status = 'active' AND set_status IS NULL
      AND (SELECT count(*) FROM head) > 0
    FOR NO KEY UPDATE
),
best_head AS MATERIALIZED (
    SELECT *, count(*) OVER () AS heads, max(effective) OVER () AS worst
    FROM (SELECT * FROM head ORDER BY effective, submission_no LIMIT coalesce((SELECT room FROM me), 0)) AS best
),
quota AS MATERIALIZED (
    SELECT id, generation, aged, model, has_quota, (SELECT room FROM me)::bigint AS n FROM best_head WHERE heads = 1
    UNION ALL
    SELECT id, generation, aged, model, has_quota, count(*)
    FROM (
        -- include: best_tasks
    ) AS best
    GROUP BY id, generation, aged, model, has_quota
),
locked AS MATERIALIZED (
    SELECT taken.*, round((taken.rank - quota.aged) * 1e6) AS effective, quota.model AS chosen_model,
        quota.has_quota OR taken.admission IS NOT NULL AS is_limited
    FROM quota
    CROSS JOIN LATERAL (
        SELECT ctid AS place, rank, dag_id, lock_key, admission, first_started_at IS NOT NULL AS resume,
            lineshaft.reservation_2(
                lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd), (SELECT default_max_cost_usd FROM seen)
            ) AS cost
        FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = quota.generation AND lane_id = quota.id
          AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM me))
        ORDER BY rank, submission_no
        LIMIT quota.n
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS taken
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET
        -- include: claimed_columns
    FROM locked AS taken, me
    WHERE live.ctid = taken.place
      AND NOT EXISTS (SELECT FROM locked WHERE lock_key IS NOT NULL OR is_limited OR (dag_id IS NOT NULL AND cost > 0))
      -- A DAG with a budget may have reached it.
      AND true = ALL (ARRAY(
        SELECT (SELECT dag.budget_ceiling_usd IS NULL FROM lineshaft.dag WHERE dag.id = of.dag_id OFFSET 0)
        FROM (SELECT DISTINCT dag_id FROM locked WHERE dag_id IS NOT NULL) AS of
      ))
    RETURNING live.id, live.epoch, live.dag_id, live.model, live.attempts, live.rate_limits, live.cost_usd, live.reserved_usd,
        live.heartbeat_sec, live.limit_sec, live.submission_no, taken.resume, taken.effective
),
counted AS (
    UPDATE lineshaft.instance
    SET held = held + claimed.n, busy_since = coalesce(busy_since, (SELECT now FROM me)), last_heartbeat = (SELECT now FROM me),
        silence_reported = false
    FROM (SELECT count(*) AS n FROM moved) AS claimed
    WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND claimed.n > 0
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
    SELECT (SELECT now FROM me), CASE WHEN %(start)s::boolean THEN '{task.claimed,task.started}' ELSE '{task.claimed}' END::text[],
        moved.id, moved.dag_id, %(agent_id)s::text, moved.epoch
    FROM moved
    RETURNING seq
),
-- DAGs whose first claim this is. Locked and checked again, so that of two claims only one logs it.
dag_first AS MATERIALIZED (
    SELECT id FROM lineshaft.dag
    WHERE id = ANY (ARRAY(SELECT DISTINCT dag_id FROM moved WHERE dag_id IS NOT NULL)) AND status <> 'running'
    ORDER BY id
    FOR NO KEY UPDATE
),
dag_begun AS (
    UPDATE lineshaft.dag SET status = 'running', ended_at = NULL FROM dag_first WHERE dag.id = dag_first.id AND dag.status <> 'running'
    RETURNING dag.id
),
-- The cause first: the count enforces the order.
dag_logged AS (
    INSERT INTO lineshaft.event (at, kinds, dag_id, agent_id)
    SELECT (SELECT now FROM me), '{dag.running}', dag_begun.id, %(agent_id)s::text
    FROM dag_begun
    WHERE (SELECT count(*) FROM logged) >= 0
)
SELECT
    moved.id, moved.epoch, moved.dag_id AS live_dag_id, NULL::text AS lock_key, moved.model, moved.attempts, moved.rate_limits, moved.cost_usd, moved.limit_sec,
    coalesce(moved.heartbeat_sec, (SELECT heartbeat_interval_sec FROM me)) AS heartbeat_interval_sec,
    moved.resume, task.type, task.title, task.spec, task.inputs, task.dag_id, task.parent_id, task.deadline, task.max_attempts, task.max_cost_usd,
    task.require_decision_report,
    -- include: is_outdated
    AS outdated,
    -- The rest is about the whole claim, in the first row, which exists even when nothing was claimed.
    CASE WHEN moved.n IS NULL OR moved.n = 1 THEN (SELECT now FROM clock) END AS now,
    CASE WHEN moved.n IS NULL OR moved.n = 1 THEN (SELECT claim_ttl_sec FROM seen) END AS claim_ttl_sec,
    coalesce((SELECT room > 0 FROM me), (SELECT room > 0 FROM seen)) AS has_room,
    moved.n IS NULL AND (
        NOT EXISTS (SELECT FROM seen) OR (EXISTS (SELECT FROM head) AND NOT EXISTS (SELECT FROM me)) OR EXISTS (SELECT FROM locked)
    ) AS weigh,
    -- Other claims were just taking some of the best tasks: there may be more, here or in other lanes ...
    (moved.n IS NULL OR moved.n = 1) AND (
        (SELECT count(*) FROM moved) < (SELECT count(*) FROM locked)
        OR ((SELECT count(*) FROM head) > 1 AND (SELECT sum(n) FROM quota) > (SELECT count(*) FROM locked))
    ) AS contested,
    -- ... or they hold everything.
    moved.n IS NULL AND EXISTS (SELECT FROM head) AND NOT EXISTS (SELECT FROM locked) AS missed,
    -- A claim that comes back short promotes what is due.
    CASE
        WHEN (moved.n IS NULL OR moved.n = 1) AND (SELECT room FROM seen) > (SELECT count(*) FROM moved) THEN (
            SELECT true FROM lineshaft.task_live
            WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL AND due_at <= (SELECT now FROM clock)
            ORDER BY due_at LIMIT 1
        ) IS TRUE
        ELSE false
    END AS due,
    -- The caller sorts by this: it costs less there than sorting whole specs here.
    moved.n::integer AS n
FROM (VALUES (1)) AS always
LEFT JOIN (
    (SELECT *, row_number() OVER (ORDER BY effective, submission_no) AS n FROM moved) AS moved
    JOIN lineshaft.task ON task.id = moved.id
) ON true
