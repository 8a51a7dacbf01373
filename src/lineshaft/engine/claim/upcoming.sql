-- name: openings
-- Seconds until the next delay ends, the next lease expires and the next guard opens: a slowdown ends, a breaker may be probed, a quota
-- is to be looked at or, with a daily budget, a UTC day begins. And whether a guard has opened since the last call.
SELECT
    extract(epoch FROM (
        SELECT due_at FROM lineshaft.task_live WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL ORDER BY due_at LIMIT 1
    ) - clock.now)::double precision AS due_sec,
    extract(epoch FROM (
        SELECT lease_until FROM lineshaft.task_live WHERE lease_until IS NOT NULL ORDER BY lease_until LIMIT 1
    ) - clock.now)::double precision AS lease_sec,
    extract(epoch FROM least(
        (SELECT min(until) FROM lineshaft.slowdown WHERE until > clock.now),
        (SELECT min(probe_at) FROM lineshaft.breaker WHERE state <> 'closed' AND NOT forced AND probe_at > clock.now),
        CASE WHEN clock.daily THEN clock.midnight + interval '24 hours' END,
        (SELECT at FROM lineshaft.quota_wake ORDER BY at LIMIT 1)
    ) - clock.now)::double precision AS guard_sec,
    clock.now,
    -- Also one that began and ended between two calls.
    EXISTS (SELECT FROM lineshaft.slowdown WHERE until > %(since)s::timestamptz AND until <= clock.now)
        OR EXISTS (
            SELECT FROM lineshaft.breaker
            WHERE state <> 'closed' AND NOT forced AND probe_at > %(since)s::timestamptz AND probe_at <= clock.now
        )
        OR coalesce(clock.daily AND clock.midnight > %(since)s::timestamptz, false) AS opened
FROM (
    -- The day is that of UTC.
    SELECT now, date_trunc('day', now AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS midnight,
        (SELECT daily_budget_usd IS NOT NULL FROM lineshaft.limits) AS daily
    FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS given
) AS clock

-- name: retry_within
-- How many tasks of these types retry soon after a failure, and the seconds until the first. Other delays and rate limits don't count: how
-- long they last isn't known in advance.
SELECT count(*)::integer AS count, extract(epoch FROM min(live.due_at) - min(clock.now))::double precision AS due_sec
FROM lineshaft.task_live AS live
JOIN lineshaft.lane ON lane.id = live.lane_id
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.status = 'RETRYING' AND live.due_at IS NOT NULL AND live.due_at <= clock.now + make_interval(secs => %(within)s::double precision)
  AND live.rate_limits = 0 AND live.long_waits = 0 AND lane.type = ANY (%(types)s::text[])

-- name: left_behind
-- The tasks of these types that wait for a time or are held, and the seconds until the first of each kind; and those that are READY all the
-- same, up to 1,000.
SELECT
    delayed.retrying,
    extract(epoch FROM delayed.retry_at - clock.now)::double precision AS retry_sec,
    delayed.scheduled,
    extract(epoch FROM delayed.scheduled_at - clock.now)::double precision AS scheduled_sec,
    delayed.waiting,
    leased.held,
    extract(epoch FROM leased.lease_until - clock.now)::double precision AS lease_sec,
    unclaimed.ready, unclaimed.ready_id
FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
CROSS JOIN (
    SELECT
        count(*) FILTER (WHERE live.status = 'RETRYING')::integer AS retrying,
        min(live.due_at) FILTER (WHERE live.status = 'RETRYING') AS retry_at,
        count(*) FILTER (WHERE live.status = 'PENDING' AND wait.signal IS NULL)::integer AS scheduled,
        min(live.due_at) FILTER (WHERE live.status = 'PENDING' AND wait.signal IS NULL) AS scheduled_at,
        count(*) FILTER (WHERE live.status = 'PENDING' AND wait.signal IS NOT NULL)::integer AS waiting
    FROM lineshaft.task_live AS live
    JOIN lineshaft.lane ON lane.id = live.lane_id
    LEFT JOIN lineshaft.wait ON wait.task_id = live.id AND wait.epoch = live.epoch
    WHERE live.status IN ('PENDING', 'RETRYING') AND live.due_at IS NOT NULL AND lane.type = ANY (%(types)s::text[])
) AS delayed
CROSS JOIN (
    SELECT count(*)::integer AS held, min(live.lease_until) AS lease_until
    FROM lineshaft.task_live AS live
    JOIN lineshaft.lane ON lane.id = live.lane_id
    WHERE live.lease_until IS NOT NULL AND live.status IN ('CLAIMED', 'RUNNING') AND lane.type = ANY (%(types)s::text[])
) AS leased
CROSS JOIN (
    SELECT count(*)::integer AS ready, min(found.id) AS ready_id
    FROM (
        SELECT live.id
        FROM lineshaft.task_live AS live
        JOIN lineshaft.lane ON lane.id = live.lane_id
        WHERE live.status = 'READY' AND lane.type = ANY (%(types)s::text[])
        LIMIT 1000
    ) AS found
) AS unclaimed
