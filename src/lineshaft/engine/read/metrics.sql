-- name: try_tally
-- One process at a time.
SELECT pg_try_advisory_xact_lock(hashtextextended('lineshaft.tally', 0))

-- name: tally
-- Adds events since the last call to the totals. The place is a snapshot, as in feed/events.py: each event is counted once, however late
-- its transaction commits. Sent after try_tally, so that its own snapshot is newer than the place.
-- At most `most` events by event_feed, and the rest of the last one's transaction: then the new place is a snapshot that ends with that
-- transaction, with those in progress. Returns whether there may be more.
WITH last AS MATERIALIZED (SELECT since, pg_current_snapshot() AS now FROM lineshaft.tally_place),
slice AS MATERIALIZED (
    SELECT (event.xid::text::bigint + 1)::text::xid8 AS ends
    FROM lineshaft.event
    WHERE event.xid >= (SELECT pg_snapshot_xmax(since) FROM last)
    ORDER BY event.xid
    OFFSET %(most)s::bigint - 1
    LIMIT 1
),
place AS MATERIALIZED (
    SELECT
        last.since,
        slice.ends IS NOT NULL AS more,
        CASE
            WHEN slice.ends IS NULL THEN last.now
            ELSE concat(
                least(pg_snapshot_xmin(last.now), slice.ends), ':', slice.ends, ':',
                (SELECT string_agg(xid::text, ',' ORDER BY xid) FROM pg_snapshot_xip(last.now) AS open (xid) WHERE xid < slice.ends)
            )::pg_snapshot
        END AS until
    FROM last LEFT JOIN slice ON true
),
news AS MATERIALIZED (
    SELECT event.kinds, event.task_id, event.agent_id, event.epoch, event.data
    FROM lineshaft.event
    WHERE event.xid >= (SELECT pg_snapshot_xmax(since) FROM place) AND event.xid < (SELECT pg_snapshot_xmax(until) FROM place)
      AND pg_visible_in_snapshot(event.xid, (SELECT until FROM place)) AND event.task_id IS NOT NULL
    UNION ALL
    SELECT event.kinds, event.task_id, event.agent_id, event.epoch, event.data
    FROM place
    CROSS JOIN LATERAL pg_snapshot_xip(place.since) AS open (xid)
    JOIN lineshaft.event ON event.xid = open.xid
    WHERE pg_visible_in_snapshot(event.xid, place.until) AND event.task_id IS NOT NULL
),
-- The cost of a task's last attempt is the cost of the task minus that of earlier attempts.
completed AS MATERIALIZED (
    SELECT
        task.type, coalesce(ended.agent_id, '') AS agent, coalesce(ended.model, '') AS model,
        greatest(ended.cost_usd - coalesce((
            SELECT sum(attempt.cost_usd) FROM lineshaft.attempt WHERE attempt.task_id = ended.id
        ), 0), 0) AS cost
    FROM news
    JOIN lineshaft.task_end AS ended ON ended.id = news.task_id AND ended.epoch = news.epoch AND ended.status = 'COMPLETED'
    JOIN lineshaft.task ON task.id = news.task_id
    WHERE 'task.completed' = ANY (news.kinds)
),
ended_attempt AS MATERIALIZED (
    SELECT task.type, coalesce(attempt.agent_id, '') AS agent, coalesce(attempt.model, '') AS model, attempt.cost_usd AS cost
    FROM news
    JOIN lineshaft.attempt ON attempt.task_id = news.task_id AND attempt.epoch = news.epoch AND attempt.outcome <> 'validating'
    JOIN lineshaft.task ON task.id = news.task_id
    WHERE news.kinds && '{task.failed,task.rate_limited,task.released,task.waiting,task.cancelled}' AND attempt.cost_usd > 0
),
failed AS MATERIALIZED (
    SELECT coalesce(news.agent_id, '') AS agent, news.data ->> 'category' AS category, news.data ->> 'error' AS error
    FROM news WHERE 'task.failed' = ANY (news.kinds)
),
counted AS (
    SELECT 'completed' AS name, ARRAY[type, agent] AS labels, count(*)::numeric AS value FROM completed GROUP BY type, agent
    UNION ALL
    SELECT 'failed', ARRAY[coalesce(category, ''), agent], count(*) FROM failed GROUP BY category, agent
    UNION ALL
    SELECT 'heartbeat_missed', ARRAY[agent], count(*) FROM failed WHERE error = 'heartbeat_timeout' GROUP BY agent
    UNION ALL
    SELECT 'dead_lettered', '{}', count(*) FROM news WHERE 'task.dead_lettered' = ANY (kinds) HAVING count(*) > 0
    UNION ALL
    SELECT 'cost', ARRAY[type, agent, model], sum(cost)
    FROM (SELECT * FROM completed UNION ALL SELECT * FROM ended_attempt) AS paid
    GROUP BY type, agent, model HAVING sum(cost) > 0
),
added AS (
    INSERT INTO lineshaft.tally AS known (name, labels, value)
    SELECT name, labels, value FROM counted
    ON CONFLICT (name, labels) DO UPDATE SET value = known.value + excluded.value
)
UPDATE lineshaft.tally_place SET since = place.until FROM place RETURNING place.more

-- name: read_tally
SELECT name, labels, value FROM lineshaft.tally
UNION ALL
SELECT 'duplicate', '{}', CASE WHEN is_called THEN last_value ELSE 0 END FROM lineshaft.duplicate_no
ORDER BY name, labels

-- name: waits
-- Waits of the tasks that ended last, from READY to their first start.
SELECT percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY recent.waited) AS quantiles
FROM (
    SELECT extract(epoch FROM first_started_at - ready_at)::double precision AS waited
    FROM lineshaft.task_end
    WHERE first_started_at IS NOT NULL AND ready_at IS NOT NULL
    ORDER BY ended_at DESC
    LIMIT %(most)s::integer
) AS recent
