-- fragment: limits
limits.daily_budget_usd, limits.velocity_usd, limits.velocity_window_sec, limits.velocity_action, limits.default_max_cost_usd,
limits.crash_cost_fraction, limits.judge_max_cost_usd, limits.breakers, limits.applied, limits.by_hand

-- name: read_limits
SELECT coalesce(spend.spent_usd, 0) AS spent_today_usd, limits.reserved_usd,
-- include: limits
FROM lineshaft.limits
LEFT JOIN lineshaft.spend ON spend.day = (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date

-- name: lock_limits
SELECT
-- include: limits
FROM lineshaft.limits FOR NO KEY UPDATE

-- name: write_limits
UPDATE lineshaft.limits
SET daily_budget_usd = %(daily_budget_usd)s::numeric, velocity_usd = %(velocity_usd)s::numeric,
    velocity_window_sec = %(velocity_window_sec)s::double precision, velocity_action = %(velocity_action)s::text,
    default_max_cost_usd = %(default_max_cost_usd)s::numeric, crash_cost_fraction = %(crash_cost_fraction)s::numeric,
    judge_max_cost_usd = %(judge_max_cost_usd)s::numeric,
    breakers = %(breakers)s::jsonb, applied = %(applied)s::jsonb, by_hand = %(by_hand)s::jsonb,
    daily_budget_cut = CASE
        WHEN %(daily_budget_usd)s::numeric IS NOT DISTINCT FROM daily_budget_usd THEN daily_budget_cut
        WHEN %(daily_budget_usd)s::numeric < reserved_usd + coalesce((SELECT spent_usd FROM lineshaft.spend WHERE day = today.day), 0)
            THEN today.day
    END
FROM (SELECT (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date AS day) AS today

-- name: log_limits
INSERT INTO lineshaft.event (at, kinds, data)
VALUES (coalesce(%(now)s::timestamptz, now()), '{limits.changed}', %(data)s::jsonb)

-- name: running_servers
-- The one that started last first.
SELECT name, version, started_at, limits
FROM lineshaft.server
WHERE seen_at >= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(silent_sec)s::double precision)
ORDER BY started_at DESC, id
