-- Figures, without ever counting a large table: see store/stats.py.
--
-- A tier is its number, from 0 for critical; it is worked out from the rank, as claims do, because 004's formula costs several times as
-- much a row. What was never READY has no age, and so no rank yet. Lanes are read in order, that is by index: see plan_to_scan.

-- name: table_sizes
-- How large the tables are, in pages, and whether the live one has more than `most` rows.
SELECT coalesce(%(now)s::timestamptz, now()) AS now,
    pg_relation_size('lineshaft.task_live') / current_setting('block_size')::integer AS live_pages,
    pg_relation_size('lineshaft.task_end') / current_setting('block_size')::integer AS ended_pages,
    pg_relation_size('lineshaft.attempt') / current_setting('block_size')::integer AS attempt_pages,
    (SELECT count(*) FROM (SELECT id FROM lineshaft.task_live ORDER BY id LIMIT %(most)s::integer) AS some_tasks)::integer AS live_rows

-- name: depth_counted
-- All live tasks; for few.
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)
SELECT live.status::text AS status, live.tier, count(*)::integer AS n, min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.status, live.ready_at, width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier
    FROM lineshaft.task_live AS live
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.status, live.tier

-- name: depth_indexed
-- States that have an index of their own, each up to `most` rows: in an agent's hands, waiting for a retry, READY.
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)
SELECT live.source, live.status::text AS status, live.tier, count(*)::integer AS n,
    min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.source, live.status, live.ready_at, width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier
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
WITH lane AS MATERIALIZED (
    SELECT id, boost_per_minute * lineshaft.minutes(clock.now) AS aged, clock.now
    FROM lineshaft.lane CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    ORDER BY id
)
SELECT live.status::text AS status, live.tier, count(*)::integer AS n, min(live.ready_at) FILTER (WHERE live.status = 'READY') AS oldest
FROM (
    SELECT live.status, live.ready_at, width_bucket(CASE
        WHEN live.ready_at IS NOT NULL THEN live.rank - lane.aged
        ELSE lineshaft.rank(live.priority, live.downstream, 0, lane.now, live.deadline, lane.now)
    END, %(tiers)s::double precision[]) AS tier
    FROM lineshaft.task_live AS live TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
    JOIN lane ON lane.id = live.lane_id
) AS live
GROUP BY live.status, live.tier

-- name: oldest_of_first
-- Ids begin with the time of submission: the longest-waiting task is most likely among the first by id.
SELECT min(ready_at) AS oldest
FROM (SELECT status, ready_at FROM lineshaft.task_live ORDER BY id LIMIT 1000) AS live
WHERE status = 'READY'

-- name: ended_sampled
SELECT status::text AS status, count(*)::integer AS n
FROM lineshaft.task_end TABLESAMPLE SYSTEM (coalesce(%(percent)s::real, 100))
GROUP BY status

-- name: ended_badly_counted
-- Through task_end_not_completed, each up to `most`.
SELECT 'CANCELLED' AS status,
    (SELECT count(*) FROM (SELECT FROM lineshaft.task_end WHERE status = 'CANCELLED' AND status <> 'COMPLETED' LIMIT %(most)s::integer) AS few)::integer AS n
UNION ALL
SELECT 'DEAD_LETTERED',
    (SELECT count(*) FROM (SELECT FROM lineshaft.task_end WHERE status = 'DEAD_LETTERED' AND status <> 'COMPLETED' LIMIT %(most)s::integer) AS few)::integer

-- name: ends_by_time
-- What ended in each part of a window and, if asked for, what the attempts that completed cost, through task_end_by_age: at most `most` rows a part.
-- A part that has more is cut at its last row's time, from which its rate can be told.
SELECT
    extract(epoch FROM part.upto - part.since)::double precision AS seconds,
    extract(epoch FROM looked_at.last - part.since)::double precision AS covered,
    looked_at.n, looked_at.completed, looked_at.cancelled, looked_at.dead_lettered, looked_at.cost_usd
FROM (
    -- Steps are rounded to microseconds; the last one ends where the window does.
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
) AS looked_at
ORDER BY part.since

-- name: attempts_sampled
-- What attempts cost that ended without success since then, and those whose output waits for a gate that runs elsewhere.
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
-- What the attempts under way have cost so far.
SELECT coalesce(sum(attempt_cost_usd), 0) AS cost_usd
FROM (SELECT attempt_cost_usd FROM lineshaft.task_live WHERE lease_until IS NOT NULL LIMIT %(most)s::integer) AS held
