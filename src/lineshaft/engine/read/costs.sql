-- name: plan_to_scan
-- The table of costs is small: with many days most of it is read. It has few groups, fewer than the planner thinks: never sort all rows.
SELECT set_config('enable_seqscan', 'on', true), set_config('enable_sort', 'off', true)

-- fragment: sums
coalesce(sum(attempts), 0)::bigint AS attempts, coalesce(sum(failed), 0)::bigint AS failed, coalesce(sum(retries), 0)::bigint AS retries,
coalesce(sum(unpriced), 0)::bigint AS unpriced, coalesce(sum(tokens_input), 0)::bigint AS tokens_input,
coalesce(sum(tokens_output), 0)::bigint AS tokens_output, coalesce(sum(cost_usd), 0)::numeric(20, 6) AS cost_usd,
coalesce(sum(failed_cost_usd), 0)::numeric(20, 6) AS failed_cost_usd, coalesce(sum(retry_cost_usd), 0)::numeric(20, 6) AS retry_cost_usd

-- fragment: filters
day >= %(since)s::date AND day <= %(upto)s::date
AND (%(type)s::text IS NULL OR type = %(type)s::text)
AND (%(model)s::text IS NULL OR model = %(model)s::text)
AND (%(agent_id)s::text IS NULL OR agent_id = %(agent_id)s::text)

-- name: days
SELECT day,
-- include: sums
FROM lineshaft.cost_day
WHERE
-- include: filters
GROUP BY day

-- name: lines
-- The other tables of costs, from one pass over the rows of the days. Of each list the most expensive `most`; the rest are one line.
WITH part AS MATERIALIZED (
    SELECT type, model, agent_id,
    -- include: sums
    FROM lineshaft.cost_day
    WHERE
    -- include: filters
    GROUP BY type, model, agent_id
),
line AS MATERIALIZED (
    SELECT
        CASE WHEN grouping(type) = 0 THEN 'type' WHEN grouping(model) = 0 THEN 'model' WHEN grouping(agent_id) = 0 THEN 'agent' ELSE 'total' END AS list,
        coalesce(type, model, agent_id, '') AS key,
    -- include: sums
    FROM part
    GROUP BY GROUPING SETS ((type), (model), (agent_id), ())
),
ranked AS (
    SELECT line.*, CASE WHEN list = 'total' THEN 0 ELSE
            row_number() OVER (PARTITION BY list ORDER BY key = '*', cost_usd DESC, attempts DESC, key) END AS no
    FROM line
)
SELECT list, CASE WHEN no <= %(most)s::integer THEN key ELSE '*' END AS key,
-- include: sums
FROM ranked
GROUP BY 1, 2
ORDER BY 1, min(no), 2

-- name: spent
SELECT day, spent_usd FROM lineshaft.spend WHERE day >= %(since)s::date AND day <= %(upto)s::date ORDER BY day

-- name: today
SELECT clock.now, limits.daily_budget_usd, limits.reserved_usd
FROM lineshaft.limits
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock

-- name: hours
SELECT date_trunc('hour', at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS at, sum(cost_usd)::numeric(20, 6) AS cost_usd, sum(priced)::integer AS attempts
FROM lineshaft.minute
WHERE at >= %(since)s::timestamptz
GROUP BY 1 ORDER BY 1

-- name: last_hour
-- The current minute and the 59 before it.
SELECT coalesce(sum(cost_usd), 0)::numeric(20, 6) AS cost_usd, coalesce(sum(priced), 0)::integer AS attempts
FROM lineshaft.minute
WHERE at > coalesce(%(now)s::timestamptz, now()) - interval '1 hour'

-- name: dags
-- The newest `scanned` DAGs, by dag_by_age.
SELECT count(*) OVER () AS seen, recent.*
FROM (
    SELECT id, title, status::text AS status, created_at, spent_usd, budget_ceiling_usd
    FROM lineshaft.dag
    WHERE created_at >= %(since)s::timestamptz
    ORDER BY created_at DESC
    LIMIT %(scanned)s::integer
) AS recent
ORDER BY recent.spent_usd DESC, recent.created_at DESC
LIMIT %(most)s::integer

-- name: disputed
-- By cost_dispute_open.
SELECT sum(sum(dispute.reported_usd - dispute.ceiling_usd - dispute.decided_usd)) OVER ()::numeric(20, 6) AS all_disputed_usd,
    task.id, task.title, task.type, (array_agg(dispute.agent_id ORDER BY dispute.epoch DESC))[1] AS agent_id,
    coalesce(live.cost_usd + live.attempt_cost_usd, ended.cost_usd)::numeric(20, 6) AS cost_usd,
    sum(dispute.reported_usd - dispute.ceiling_usd - dispute.decided_usd)::numeric(20, 6) AS disputed_usd, min(dispute.at) AS since
FROM lineshaft.cost_dispute AS dispute
JOIN lineshaft.task ON task.id = dispute.task_id
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE dispute.reported_usd - dispute.ceiling_usd > dispute.decided_usd
GROUP BY task.id, live.id, ended.id
ORDER BY disputed_usd DESC, since
LIMIT %(most)s::integer
