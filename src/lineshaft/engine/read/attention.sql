-- name: attention
-- One statement, for every page: each count is by index and stops at `most`.
WITH RECURSIVE clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
-- One look-up for each DAG, by task_live_budget_waiters.
short_of_money AS (
    (SELECT dag_id FROM lineshaft.task_live WHERE parked = 'dag_budget' ORDER BY dag_id LIMIT 1)
    UNION ALL
    SELECT following.dag_id
    FROM short_of_money
    CROSS JOIN LATERAL (
        SELECT live.dag_id FROM lineshaft.task_live AS live
        WHERE live.parked = 'dag_budget' AND live.dag_id > short_of_money.dag_id ORDER BY live.dag_id LIMIT 1
    ) AS following
),
fleet AS MATERIALIZED (
    SELECT count(*) FILTER (WHERE is_active) AS active, count(*) FILTER (WHERE NOT is_active AND is_draining) AS draining,
        count(*) FILTER (WHERE NOT is_active AND NOT is_draining) AS offline,
        count(*) FILTER (WHERE NOT is_active AND NOT is_draining AND fell_silent) AS lost
    FROM (
        SELECT bool_or(status = 'active') AS is_active, bool_or(status = 'draining') AS is_draining, bool_or(fell_silent) AS fell_silent
        FROM (
            -- One that has left said so.
            SELECT instance.agent_id, instance.status <> 'offline' AS fell_silent, CASE WHEN
                -- include: instance_liveness
                = 'offline' THEN 'offline' ELSE coalesce(instance.set_status, instance.status)::text END AS status
            FROM lineshaft.instance
        ) AS instances
        GROUP BY agent_id
    ) AS agents
)
SELECT
    clock.now AS as_of,
    (SELECT count(*) FROM (SELECT FROM lineshaft.dead_letter WHERE NOT reviewed AND NOT hidden LIMIT %(most)s::integer) AS few)::integer
        AS dead_letters,
    (SELECT count(*) FROM (
        (SELECT FROM lineshaft.attempt WHERE outcome = 'validating' AND gate = 'human' LIMIT %(most)s::integer)
        UNION ALL
        -- Lane by lane, by task_live_claimable.
        (SELECT FROM lineshaft.lane CROSS JOIN lineshaft.generation
        CROSS JOIN LATERAL (
            SELECT FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = generation.no AND live.lane_id = lane.id
            LIMIT %(most)s::integer
        ) AS live
        WHERE lane.required_capabilities @> '{human}'
        LIMIT %(most)s::integer)
        LIMIT %(most)s::integer
    ) AS few)::integer AS approvals,
    ARRAY(SELECT key FROM lineshaft.breaker WHERE state <> 'closed' AND (state <> 'closed' OR failures > 0) ORDER BY key LIMIT %(most)s::integer)
        AS open_breakers,
    ARRAY(SELECT key FROM lineshaft.slowdown WHERE until > clock.now ORDER BY key LIMIT %(most)s::integer) AS slowdowns,
    ARRAY(SELECT type FROM lineshaft.pause ORDER BY type LIMIT %(most)s::integer) AS paused,
    limits.daily_budget_usd, limits.reserved_usd, coalesce(spend.spent_usd, 0)::numeric(20, 6) AS spent_today_usd,
    fleet.active::integer AS agents_active, fleet.draining::integer AS agents_draining, fleet.offline::integer AS agents_offline,
    fleet.lost::integer AS agents_lost,
    (SELECT count(*) FROM (SELECT FROM short_of_money LIMIT %(most)s::integer) AS few)::integer AS dags_over_budget,
    (SELECT count(*) FROM (
        SELECT DISTINCT task_id FROM lineshaft.cost_dispute WHERE reported_usd - ceiling_usd > decided_usd LIMIT %(most)s::integer
    ) AS few)::integer AS disputed_tasks
FROM clock
CROSS JOIN lineshaft.limits
CROSS JOIN fleet
LEFT JOIN lineshaft.spend ON spend.day = (clock.now AT TIME ZONE 'UTC')::date
