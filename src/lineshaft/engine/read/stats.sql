-- Never counts a large table: see stats.py.

-- fragment: aged_lanes
-- In order of id, that is by index: see plan_to_scan.
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)

-- fragment: tier
-- The number of the tier, from 0 for critical, from the rank, as in claims: the formula of the effective priority is several times as
-- expensive. A task that was never READY has no age, and so no rank yet.
width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier

-- name: table_sizes
-- In pages; live_rows up to `most`.
SELECT coalesce(%(now)s::timestamptz, now()) AS now,
    pg_relation_size('lineshaft.task_live') / current_setting('block_size')::integer AS live_pages,
    pg_relation_size('lineshaft.task_end') / current_setting('block_size')::integer AS ended_pages,
    pg_relation_size('lineshaft.attempt') / current_setting('block_size')::integer AS attempt_pages,
    (SELECT count(*) FROM (SELECT id FROM lineshaft.task_live ORDER BY id LIMIT %(most)s::integer) AS some_tasks)::integer AS live_rows

-- name: depth_counted
-- All live tasks, if they are few.
-- include: aged_lanes
SELECT live.status::text AS status, live.tier, count(*)::integer AS n, min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.status, live.ready_at,
    -- include: tier
    FROM lineshaft.task_live AS live
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.status, live.tier

-- name: depth_indexed
-- Statuses that have their own index, each up to `most` rows.
-- include: aged_lanes
SELECT live.source, live.status::text AS status, live.tier, count(*)::integer AS n,
    min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.source, live.status, live.ready_at,
    -- include: tier
    FROM (
        (SELECT 'held' AS source, status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE lease_until IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'due', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'ready', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status = 'READY' AND parked IS NULL LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'wants_lock', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status = 'READY' AND lock_key IS NOT NULL AND parked = 'lock' LIMIT %(most)s::integer)
        UNION ALL
        (SELECT 'wants_money', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE parked = 'dag_budget' LIMIT %(most)s::integer)
    ) AS live
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.source, live.status, live.tier

-- name: depth_sampled
-- include: aged_lanes
SELECT live.status::text AS status, live.tier, count(*)::integer AS n, min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.status, live.ready_at,
    -- include: tier
    FROM lineshaft.task_live AS live TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.status, live.tier

-- name: oldest_of_first
-- Ids begin with the time of submission: the oldest task is most likely among the first by id.
SELECT min(ready_at) AS oldest
FROM (SELECT status, ready_at FROM lineshaft.task_live ORDER BY id LIMIT 1000) AS live
WHERE status = 'READY'

-- name: ended_sampled
SELECT status::text AS status, count(*)::integer AS n
FROM lineshaft.task_end TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
GROUP BY status

-- name: ended_badly_counted
-- By task_end_not_completed, each up to `most`.
SELECT 'CANCELLED' AS status,
    (SELECT count(*) FROM (SELECT FROM lineshaft.task_end WHERE status = 'CANCELLED' AND status <> 'COMPLETED' LIMIT %(most)s::integer) AS few)::integer AS n
UNION ALL
SELECT 'DEAD_LETTERED',
    (SELECT count(*) FROM (SELECT FROM lineshaft.task_end WHERE status = 'DEAD_LETTERED' AND status <> 'COMPLETED' LIMIT %(most)s::integer) AS few)::integer

-- name: ends_by_time
-- Ends in each part of a window and, with_cost, the cost of completed attempts. By task_end_by_age, at most `most` rows of a part. `covered` is the
-- time that these rows span, for extrapolation.
SELECT
    extract(epoch FROM part.upto - part.since)::double precision AS seconds,
    extract(epoch FROM counted.last - part.since)::double precision AS covered,
    counted.n, counted.completed, counted.cancelled, counted.dead_lettered, counted.cost_usd
FROM (
    -- Steps are rounded to microseconds; the last part ends with the window.
    SELECT span.since + (n - 1) * span.step AS since,
        CASE WHEN n = %(parts)s::integer THEN %(upto)s::timestamptz ELSE span.since + n * span.step END AS upto
    FROM (
        SELECT %(since)s::timestamptz AS since, (%(upto)s::timestamptz - %(since)s::timestamptz) / %(parts)s::integer AS step
    ) AS span
    CROSS JOIN generate_series(1, %(parts)s::integer) AS n
) AS part
CROSS JOIN LATERAL (
    SELECT count(*)::integer AS n, max(ended_at) AS last,
        count(*) FILTER (WHERE status = 'COMPLETED')::integer AS completed,
        count(*) FILTER (WHERE status = 'CANCELLED')::integer AS cancelled,
        count(*) FILTER (WHERE status = 'DEAD_LETTERED')::integer AS dead_lettered,
        coalesce(sum(CASE WHEN %(with_cost)s::boolean AND status = 'COMPLETED' THEN cost_usd - CASE WHEN epoch > 1 THEN coalesce((
            SELECT sum(attempt.cost_usd) FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch < ended.epoch
        ), 0) ELSE 0 END END), 0) AS cost_usd
    FROM (
        SELECT id, status, ended_at, cost_usd, epoch FROM lineshaft.task_end
        WHERE ended_at > part.since AND ended_at <= part.upto
        ORDER BY ended_at
        LIMIT %(most)s::integer
    ) AS ended
) AS counted
ORDER BY part.since

-- name: attempts_sampled
-- The cost of attempts without success since then, and of those whose output waits for a gate that runs elsewhere.
SELECT coalesce(sum(attempt.cost_usd), 0) AS cost_usd
FROM lineshaft.attempt TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
WHERE attempt.cost_usd > 0
  AND (
    (attempt.ended_at > %(since)s::timestamptz AND attempt.outcome NOT IN ('validating', 'completed'))
    OR (attempt.outcome = 'validating' AND EXISTS (
        SELECT FROM lineshaft.task_live AS live
        WHERE live.id = attempt.task_id AND live.epoch = attempt.epoch AND live.status = 'VALIDATING' AND live.agent_id IS NULL
    ))
  )

-- name: held_cost
-- The cost of current attempts so far.
SELECT coalesce(sum(attempt_cost_usd), 0) AS cost_usd
FROM (SELECT attempt_cost_usd FROM lineshaft.task_live WHERE lease_until IS NOT NULL LIMIT %(most)s::integer) AS held
