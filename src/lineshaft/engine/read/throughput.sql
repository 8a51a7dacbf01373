-- name: minutes
SELECT at, completed, failed, dead_lettered, cancelled FROM lineshaft.minute
WHERE at >= %(since)s::timestamptz AND at <= %(upto)s::timestamptz ORDER BY at

-- name: clock
SELECT date_trunc('second', coalesce(%(now)s::timestamptz, now())) AS now

-- name: waits
-- Waits of the tasks that ended last, from READY to their first start. Bounded before those that never started are left out.
SELECT percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY recent.waited) AS quantiles, count(*)::integer AS n
FROM (
    SELECT extract(epoch FROM first_started_at - ready_at)::double precision AS waited
    FROM lineshaft.task_end
    ORDER BY ended_at DESC
    LIMIT %(most)s::integer
) AS recent
WHERE recent.waited IS NOT NULL
