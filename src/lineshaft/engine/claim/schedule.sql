-- name: openings
-- Seconds until the next delay ends, the next lease expires and the next guard opens: a slowdown ends, a breaker may be probed or, with a
-- daily budget, a UTC day begins. And whether a guard has opened since the last call.
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
        CASE WHEN %(daily)s::boolean THEN clock.midnight + interval '24 hours' END
    ) - clock.now)::double precision AS guard_sec,
    clock.now,
    -- Also one that began and ended between two calls.
    EXISTS (SELECT FROM lineshaft.slowdown WHERE until > %(since)s::timestamptz AND until <= clock.now)
        OR EXISTS (
            SELECT FROM lineshaft.breaker
            WHERE state <> 'closed' AND NOT forced AND probe_at > %(since)s::timestamptz AND probe_at <= clock.now
        )
        OR coalesce(%(daily)s::boolean AND clock.midnight > %(since)s::timestamptz, false) AS opened
FROM (
    -- Of today, in UTC.
    SELECT now, date_trunc('day', now AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS midnight
    FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS given
) AS clock

-- name: retry_within
-- Seconds until the first retry after a failure among tasks of these types, if it is soon. Other delays and rate limits don't count: how
-- long they last isn't known in advance.
SELECT extract(epoch FROM min(live.due_at) - clock.now)::double precision
FROM lineshaft.task_live AS live
JOIN lineshaft.lane ON lane.id = live.lane_id
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.status = 'RETRYING' AND live.due_at IS NOT NULL AND live.due_at <= clock.now + make_interval(secs => %(within)s::double precision)
  AND live.rate_limits = 0 AND lane.type = ANY (%(types)s::text[])
GROUP BY clock.now
