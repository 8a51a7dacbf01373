-- The cost velocity: what is spent within a window. A sample is the total spend at an instant; the window's spend is the total now, without
-- the latest sample from before the window. Between samples, a booking or report looks again as soon as a thousandth of the limit was spent.

-- fragment: sample
-- The total includes what current attempts have reported: within a reservation it isn't booked before their end.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
total AS MATERIALIZED (
    SELECT (SELECT coalesce(sum(spent_usd), 0) FROM lineshaft.spend) + (
        SELECT coalesce(sum(least(attempt_cost_usd, reserved_usd)), 0) FROM lineshaft.task_live WHERE lease_until IS NOT NULL AND day_reserved
    ) AS usd,
    coalesce((SELECT spent_usd FROM lineshaft.spend WHERE day = (clock.now AT TIME ZONE 'UTC')::date), 0) AS day_usd
    FROM clock
),
sampled AS (
    INSERT INTO lineshaft.spend_sample AS sample (at, total_usd, day_usd)
    SELECT clock.now, total.usd, total.day_usd FROM clock CROSS JOIN total CROSS JOIN lineshaft.limits WHERE limits.velocity_usd IS NOT NULL
    ON CONFLICT (at) DO UPDATE
    SET total_usd = greatest(sample.total_usd, excluded.total_usd), day_usd = greatest(sample.day_usd, excluded.day_usd)
)

-- name: forget_samples
DELETE FROM lineshaft.spend_sample

-- name: begin
-- include: sample
SELECT FROM total

-- name: date_back
-- A sample has everything that was spent until its instant; the first one has nothing of it.
UPDATE lineshaft.spend_sample SET at = at - interval '1 microsecond' WHERE at = coalesce(%(now)s::timestamptz, now())

-- name: is_due
-- Whether a thousandth of the limit was booked since the last sample, and whether everything is paused. What has stopped already can't be
-- stopped again.
SELECT EXISTS (SELECT FROM lineshaft.pause WHERE pause.type = '*') AS is_paused, EXISTS (
    SELECT
    FROM lineshaft.limits
    WHERE limits.velocity_usd IS NOT NULL
      AND NOT EXISTS (SELECT FROM lineshaft.pause WHERE pause.type = '*' AND (pause.stops OR limits.velocity_action = 'pause'))
      AND coalesce((
        SELECT (
            SELECT coalesce(sum(spend.spent_usd), 0) FROM lineshaft.spend
            WHERE spend.day BETWEEN (last.at AT TIME ZONE 'UTC')::date AND (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date
        ) - last.day_usd
        FROM (SELECT at, day_usd FROM lineshaft.spend_sample ORDER BY at DESC LIMIT 1) AS last
    ) >= limits.velocity_usd / 1000, true)
) AS is_due

-- name: look
-- What was spent within the window. Without a sample from before it, all samples are within it: those since the limit was set, or since it was
-- resumed.
-- include: sample
SELECT limits.velocity_usd, limits.velocity_window_sec, total.usd - before.total_usd AS spent_usd
FROM total
CROSS JOIN clock
CROSS JOIN lineshaft.limits
CROSS JOIN LATERAL (
    (
        SELECT 1 AS choice, total_usd FROM lineshaft.spend_sample
        WHERE at <= clock.now - make_interval(secs => limits.velocity_window_sec) ORDER BY at DESC LIMIT 1
    )
    UNION ALL
    (SELECT 2, total_usd FROM lineshaft.spend_sample ORDER BY at LIMIT 1)
    ORDER BY choice LIMIT 1
) AS before
WHERE limits.velocity_usd IS NOT NULL

-- name: forget_old_samples
-- All from before the window but the latest.
DELETE FROM lineshaft.spend_sample
WHERE at < (
    SELECT max(before.at)
    FROM lineshaft.limits
    JOIN lineshaft.spend_sample AS before
      ON before.at <= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => limits.velocity_window_sec)
)

-- name: stop
-- Pauses everything, with an alert; unless it is paused already. Where a person has paused claims, running attempts are stopped now too.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
paused AS (
    INSERT INTO lineshaft.pause AS present (type, since, reason, stops)
    SELECT '*', clock.now, %(reason)s::text, limits.velocity_action = 'stop' FROM lineshaft.limits CROSS JOIN clock
    ON CONFLICT (type) DO UPDATE SET stops = true, reason = concat_ws('; paused before: ', excluded.reason, present.reason)
    WHERE excluded.stops AND NOT present.stops
    RETURNING type
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT clock.now, '{queue.paused,alert}', jsonb_build_object('type', paused.type, 'key', 'cost_velocity', 'message', %(reason)s::text)
    FROM paused CROSS JOIN clock
)
SELECT count(*) AS paused FROM paused
