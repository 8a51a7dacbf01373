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
    SELECT live.id, 'dag' AS purse, lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd) AS cost
    FROM lineshaft.task_live AS live
    JOIN lineshaft.dag ON dag.id = live.dag_id
    CROSS JOIN lineshaft.limits
    WHERE live.parked = 'dag_budget' AND NOT live.budget_reported
      AND NOT lineshaft.affords_1(
        dag.budget_ceiling_usd - dag.spent_usd, lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd),
        limits.default_max_cost_usd
      )
    LIMIT %(limit)s::integer
),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation),
waiting AS (
    -- include: waiting_lanes
),
-- Lanes with capable agents, none of which has the money for all tasks.
scarce AS MATERIALIZED (
    SELECT waiting.lane_id, waiting.generation, fleet.money, limits.default_max_cost_usd
    FROM waiting
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.lane_id OFFSET 0) AS lane
    CROSS JOIN LATERAL (
        SELECT max(coalesce(agent.budget_usd - agent.spent_usd, 'Infinity')) AS money
        FROM lineshaft.instance
        JOIN lineshaft.agent ON agent.id = instance.agent_id
        -- Without budgets there is nothing to look for; and tasks of 0 USD are never too expensive.
        WHERE (SELECT EXISTS (SELECT FROM lineshaft.agent WHERE agent.budget_usd IS NOT NULL))
          AND lane.cost_from_usd IS DISTINCT FROM 0 AND instance.set_status IS NULL AND
            -- include: instance_liveness
            = 'active'
          AND lineshaft.suits_1(
            lane.type, lane.required_capabilities, lane.models, instance.types, instance.capabilities, instance.models_available
          )
    ) AS fleet
    CROSS JOIN lineshaft.limits
    WHERE fleet.money < 2 * lane.cost_from_usd OR NOT lineshaft.affords_1(fleet.money, lane.cost_from_usd, limits.default_max_cost_usd)
),
of_lanes AS MATERIALIZED (
    SELECT first.id, 'agent' AS purse, first.limit_usd AS cost
    FROM scarce
    CROSS JOIN LATERAL (
        SELECT id, budget_reported, lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd
        FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = scarce.generation AND lane_id = scarce.lane_id
        ORDER BY rank, submission_no
        LIMIT %(limit)s::integer
        OFFSET 0
    ) AS first
    WHERE NOT first.budget_reported AND NOT lineshaft.affords_1(scarce.money, first.limit_usd, scarce.default_max_cost_usd)
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
    CROSS JOIN lineshaft.limits
    WHERE CASE
        WHEN NOT lineshaft.affords_1(%(left)s::numeric, lane.cost_from_usd, limits.default_max_cost_usd) THEN true
        -- Some of its tasks may cost more than others.
        WHEN 2 * lane.cost_from_usd > %(left)s::numeric THEN EXISTS (
            SELECT
            FROM (
                SELECT lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd FROM lineshaft.task_live
                WHERE status = 'READY' AND parked IS NULL AND generation = waiting.generation AND lane_id = waiting.lane_id
                ORDER BY rank, submission_no
                LIMIT 100
                OFFSET 0
            ) AS first
            WHERE NOT lineshaft.affords_1(%(left)s::numeric, first.limit_usd, limits.default_max_cost_usd)
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
