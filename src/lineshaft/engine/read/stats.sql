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
        UNION ALL
        (SELECT 'wants_quota', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE parked_key IS NOT NULL LIMIT %(most)s::integer)
        UNION ALL
        -- Those behind others of their fair_key are among the ones above.
        (SELECT 'wants_turn', status, rank, priority, downstream, lane_id, ready_at, deadline
         FROM lineshaft.task_live WHERE status = 'READY' AND parked = 'fair' AND parked_key IS NULL LIMIT %(most)s::integer)
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

-- name: ends_since
-- Ends in a window, each count up to `most`: all by task_end_by_age, bad ones by task_end_not_completed.
SELECT
    (SELECT count(*) FROM (
        SELECT FROM lineshaft.task_end WHERE ended_at > %(since)s::timestamptz AND ended_at <= %(upto)s::timestamptz LIMIT %(most)s::integer
    ) AS some_ends)::integer AS ended,
    (SELECT count(*) FROM (
        SELECT FROM lineshaft.task_end
        WHERE status = 'CANCELLED' AND status <> 'COMPLETED' AND ended_at > %(since)s::timestamptz AND ended_at <= %(upto)s::timestamptz
        LIMIT %(most)s::integer
    ) AS some_ends)::integer AS cancelled,
    (SELECT count(*) FROM (
        SELECT FROM lineshaft.task_end
        WHERE status = 'DEAD_LETTERED' AND status <> 'COMPLETED' AND ended_at > %(since)s::timestamptz AND ended_at <= %(upto)s::timestamptz
        LIMIT %(most)s::integer
    ) AS some_ends)::integer AS dead_lettered

-- name: artifact_usage
-- Contents up to a bound, and the table's size as of its last ANALYZE, if that is larger.
SELECT count(*) AS contents, coalesce(sum(size), 0)::bigint AS bytes,
    (SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'lineshaft.content'::regclass) AS estimate
FROM (SELECT size FROM lineshaft.content WHERE stored LIMIT %(most)s::integer) AS counted

-- name: spend_today
SELECT coalesce(sum(spent_usd), 0) AS spent_usd
FROM lineshaft.spend WHERE day = (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date
