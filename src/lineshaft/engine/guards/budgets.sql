-- name: change_dag
-- With set_ceiling, a ceiling that is NULL: no limit. A title that is NULL stays as it is.
WITH before AS MATERIALIZED (SELECT id, budget_ceiling_usd, title FROM lineshaft.dag WHERE id = %(id)s::text FOR NO KEY UPDATE),
changed AS (
    UPDATE lineshaft.dag
    SET budget_ceiling_usd = CASE
        -- The largest valid amount (model/budget.py).
        WHEN %(add)s::numeric IS NOT NULL THEN least(dag.budget_ceiling_usd + %(add)s::numeric, CASE WHEN dag.budget_ceiling_usd IS NOT NULL THEN 99999999.999999 END)
        WHEN %(set_ceiling)s::boolean THEN %(ceiling)s::numeric
        ELSE dag.budget_ceiling_usd
    END,
    title = coalesce(%(title)s::text, dag.title),
    budget_cut = CASE
        WHEN %(set_ceiling)s::boolean THEN coalesce(%(ceiling)s::numeric < dag.spent_usd + dag.reserved_usd, false)
        ELSE dag.budget_cut AND dag.budget_ceiling_usd + coalesce(%(add)s::numeric, 0) < dag.spent_usd + dag.reserved_usd
    END
    FROM before
    WHERE dag.id = before.id
    RETURNING dag.id,
        CASE
            WHEN before.budget_ceiling_usd IS NOT DISTINCT FROM dag.budget_ceiling_usd THEN '{}'
            ELSE jsonb_build_object(
                'budget_ceiling_usd', jsonb_build_object('from', before.budget_ceiling_usd, 'to', dag.budget_ceiling_usd)
            )
        END
        || CASE
            WHEN before.title = dag.title THEN '{}'
            ELSE jsonb_build_object('title', jsonb_build_object('from', before.title, 'to', dag.title))
        END AS difference
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, dag_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{dag.changed}', id, difference || %(act)s::jsonb FROM changed WHERE difference <> '{}'
)
SELECT id FROM changed

-- name: task_of_virtual_dag
SELECT id FROM lineshaft.task WHERE dag_id = %(dag_id)s::text ORDER BY dag_id, id LIMIT 1

-- name: report_unaffordable
-- One event for each READY task that no agent or DAG can afford, until it is claimed or there is money again. Reserved money may be
-- returned, so it counts as available. Bounded: parked tasks by task_live_budget_unreported, and the first tasks of each lane with work
-- that may exceed every agent's budget; tasks behind them are reported when they get there.
WITH RECURSIVE clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
of_dags AS MATERIALIZED (
    SELECT live.id, 'dag' AS purse, live.max_cost_usd AS cost
    FROM lineshaft.task_live AS live
    JOIN lineshaft.dag ON dag.id = live.dag_id
    WHERE live.parked = 'dag_budget' AND NOT live.budget_reported
      AND (dag.spent_usd + coalesce(live.max_cost_usd, 0) > dag.budget_ceiling_usd
        OR (live.max_cost_usd IS NULL AND dag.spent_usd >= dag.budget_ceiling_usd))
    LIMIT %(limit)s::integer
),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation),
waiting AS (
    -- include: waiting_lanes
),
-- Lanes with capable agents, none of which has the money for all tasks.
scarce AS MATERIALIZED (
    SELECT waiting.lane_id, waiting.generation, fleet.money
    FROM waiting
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.lane_id OFFSET 0) AS lane
    CROSS JOIN LATERAL (
        SELECT max(coalesce(agent.budget_usd - agent.spent_usd, 'Infinity')) AS money
        FROM lineshaft.instance
        JOIN lineshaft.agent ON agent.id = instance.agent_id
        WHERE lane.cost_from_usd > 0 AND instance.set_status IS NULL AND
            -- include: instance_liveness
            = 'active'
          AND (instance.types IS NULL OR lane.type = ANY (instance.types))
          AND lane.required_capabilities <@ instance.capabilities
          AND (lane.models = '{}' OR instance.models_available = '{}' OR lane.models && instance.models_available)
    ) AS fleet
    WHERE fleet.money < 2 * lane.cost_from_usd
),
of_lanes AS MATERIALIZED (
    SELECT first.id, 'agent' AS purse, first.max_cost_usd AS cost
    FROM scarce
    CROSS JOIN LATERAL (
        SELECT id, budget_reported, max_cost_usd
        FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = scarce.generation AND lane_id = scarce.lane_id
        ORDER BY rank, submission_no
        LIMIT %(limit)s::integer
        OFFSET 0
    ) AS first
    WHERE NOT first.budget_reported AND first.max_cost_usd > scarce.money
    LIMIT %(limit)s::integer
),
blocked AS MATERIALIZED (
    SELECT live.id, live.dag_id, found.purse, found.cost
    FROM (SELECT * FROM of_dags UNION ALL SELECT * FROM of_lanes) AS found
    JOIN lineshaft.task_live AS live ON live.id = found.id
    WHERE live.status = 'READY' AND NOT live.budget_reported
    FOR NO KEY UPDATE OF live SKIP LOCKED
),
marked AS (UPDATE lineshaft.task_live AS live SET budget_reported = true WHERE live.id = ANY (ARRAY(SELECT id FROM blocked))),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, data)
    SELECT clock.now, '{budget.blocked}', blocked.id, blocked.dag_id, jsonb_build_object('purse', blocked.purse, 'max_cost_usd', blocked.cost)
    FROM blocked CROSS JOIN clock
)
SELECT count(*) AS blocked FROM blocked

-- name: sample_spend
-- The spend within the window, including what current attempts have reported.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
total AS MATERIALIZED (
    -- Within a reservation, what an attempt has reported isn't booked before its end.
    SELECT (SELECT coalesce(sum(spent_usd), 0) FROM lineshaft.spend) + (
        SELECT coalesce(sum(least(attempt_cost_usd, reserved_usd)), 0) FROM lineshaft.task_live WHERE lease_until IS NOT NULL AND day_reserved
    ) AS usd
),
expired AS (DELETE FROM lineshaft.spend_sample USING clock WHERE at < clock.now - make_interval(secs => %(window)s::double precision)),
sampled AS (INSERT INTO lineshaft.spend_sample (at, total_usd) SELECT clock.now, total.usd FROM clock, total ON CONFLICT (at) DO NOTHING)
SELECT total.usd - coalesce((
    SELECT total_usd FROM lineshaft.spend_sample, clock
    WHERE at >= clock.now - make_interval(secs => %(window)s::double precision)
    ORDER BY at LIMIT 1
), total.usd) AS spent
FROM total

-- name: stop_spending
-- Pauses everything, with an alert; unless it is paused already.
WITH paused AS (
    INSERT INTO lineshaft.pause (type, since, reason, stops)
    SELECT '*', coalesce(%(now)s::timestamptz, now()), %(reason)s::text, velocity_action = 'stop' FROM lineshaft.limits
    ON CONFLICT (type) DO NOTHING
    RETURNING since, reason
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT since, '{queue.paused,alert}', jsonb_build_object('type', '*', 'key', 'cost_velocity', 'message', reason) FROM paused
)
SELECT count(*) AS paused FROM paused

-- name: day
-- The spend of all agents since midnight UTC, and what is reserved now.
SELECT clock.today AS day, coalesce(spend.spent_usd, 0) AS spent_usd, limits.reserved_usd, limits.daily_budget_usd AS budget_usd
FROM (SELECT (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date AS today) AS clock
CROSS JOIN lineshaft.limits
LEFT JOIN lineshaft.spend ON spend.day = clock.today

-- name: alert_daily_budget
-- Once a day: one of the first claimable tasks of a lane costs more than what is left of the daily budget.
WITH RECURSIVE clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation),
waiting AS (
    -- include: waiting_lanes
),
short AS MATERIALIZED (
    SELECT
    FROM waiting
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.lane_id OFFSET 0) AS lane
    WHERE CASE
        WHEN lane.cost_from_usd IS NULL THEN %(left)s::numeric <= 0
        WHEN lane.cost_from_usd > %(left)s::numeric THEN true
        WHEN 2 * lane.cost_from_usd > %(left)s::numeric THEN EXISTS (
            SELECT
            FROM (
                SELECT max_cost_usd FROM lineshaft.task_live
                WHERE status = 'READY' AND parked IS NULL AND generation = waiting.generation AND lane_id = waiting.lane_id
                ORDER BY rank, submission_no
                LIMIT 100
                OFFSET 0
            ) AS first
            WHERE first.max_cost_usd > %(left)s::numeric
        )
        ELSE false
    END
    LIMIT 1
),
alerted AS (INSERT INTO lineshaft.day_alert (day) SELECT %(day)s::date FROM short ON CONFLICT (day) DO NOTHING RETURNING day),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{alert}', jsonb_build_object('key', 'daily_budget', 'message', %(message)s::text) FROM alerted
)
SELECT count(*) AS alerts FROM alerted
