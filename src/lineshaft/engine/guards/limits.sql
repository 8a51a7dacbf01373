-- name: read_limits
SELECT limits.daily_budget_usd, limits.velocity_usd, limits.velocity_window_sec, limits.velocity_action, limits.default_max_cost_usd,
    limits.crash_cost_fraction, coalesce(spend.spent_usd, 0) AS spent_today_usd, limits.reserved_usd
FROM lineshaft.limits
LEFT JOIN lineshaft.spend ON spend.day = (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date

-- name: lock_limits
SELECT daily_budget_usd, velocity_usd, velocity_window_sec, velocity_action, default_max_cost_usd, crash_cost_fraction, breakers, applied
FROM lineshaft.limits FOR NO KEY UPDATE

-- name: write_limits
UPDATE lineshaft.limits
SET daily_budget_usd = %(daily_budget_usd)s::numeric, velocity_usd = %(velocity_usd)s::numeric,
    velocity_window_sec = %(velocity_window_sec)s::double precision, velocity_action = %(velocity_action)s::text,
    default_max_cost_usd = %(default_max_cost_usd)s::numeric, crash_cost_fraction = %(crash_cost_fraction)s::numeric,
    breakers = %(breakers)s::jsonb, applied = %(applied)s::jsonb,
    daily_budget_cut = CASE
        WHEN %(daily_budget_usd)s::numeric IS NOT DISTINCT FROM daily_budget_usd THEN daily_budget_cut
        WHEN %(daily_budget_usd)s::numeric < reserved_usd + coalesce((SELECT spent_usd FROM lineshaft.spend WHERE day = today.day), 0)
            THEN today.day
    END
FROM (SELECT (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date AS day) AS today

-- name: log_limits
INSERT INTO lineshaft.event (at, kinds, data)
VALUES (coalesce(%(now)s::timestamptz, now()), '{limits.changed}', %(data)s::jsonb)
