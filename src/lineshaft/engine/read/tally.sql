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
    SELECT event.at, event.kinds, event.task_id, event.agent_id, event.epoch, event.data
    FROM lineshaft.event
    WHERE event.xid >= (SELECT pg_snapshot_xmax(since) FROM place) AND event.xid < (SELECT pg_snapshot_xmax(until) FROM place)
      AND pg_visible_in_snapshot(event.xid, (SELECT until FROM place)) AND event.task_id IS NOT NULL
    UNION ALL
    SELECT event.at, event.kinds, event.task_id, event.agent_id, event.epoch, event.data
    FROM place
    CROSS JOIN LATERAL pg_snapshot_xip(place.since) AS open (xid)
    JOIN lineshaft.event ON event.xid = open.xid
    WHERE pg_visible_in_snapshot(event.xid, place.until) AND event.task_id IS NOT NULL
),
-- What the last attempt used is what the task used minus what earlier attempts did. (An output that a gate checked has its own row, too.)
-- A batch has no attempt.
completed AS MATERIALIZED (
    SELECT
        news.at, task.type, coalesce(ended.agent_id, '') AS agent, coalesce(ended.model, '') AS model, ended.claimed_at IS NOT NULL AS is_attempt,
        ended.attempts > 0 AS is_retry, greatest(ended.cost_usd - lineshaft.corrected_1(ended.id) - coalesce(earlier.cost_usd, 0), 0) AS cost,
        greatest(ended.tokens_input - coalesce(earlier.tokens_input, 0), 0) AS tokens_in,
        greatest(ended.tokens_output - coalesce(earlier.tokens_output, 0), 0) AS tokens_out
    FROM news
    JOIN lineshaft.task_end AS ended ON ended.id = news.task_id AND ended.epoch = news.epoch AND ended.status = 'COMPLETED'
    JOIN lineshaft.task ON task.id = news.task_id
    CROSS JOIN LATERAL (
        SELECT sum(attempt.cost_usd) AS cost_usd, sum(attempt.tokens_input) AS tokens_input, sum(attempt.tokens_output) AS tokens_output
        FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch <> ended.epoch
    ) AS earlier
    WHERE 'task.completed' = ANY (news.kinds)
    UNION ALL
    -- It has been rerun since.
    SELECT news.at, task.type, coalesce(attempt.agent_id, ''), coalesce(attempt.model, ''), true, attempt.number > 1, attempt.cost_usd,
        attempt.tokens_input, attempt.tokens_output
    FROM news
    JOIN lineshaft.attempt ON attempt.task_id = news.task_id AND attempt.epoch = news.epoch AND attempt.outcome = 'completed'
    JOIN lineshaft.task ON task.id = news.task_id
    WHERE 'task.completed' = ANY (news.kinds)
      AND NOT EXISTS (SELECT FROM lineshaft.task_end AS ended WHERE ended.id = news.task_id AND ended.epoch = news.epoch)
),
-- By its outcome and time: a task that is cancelled while it waits has the epoch of an attempt that ended before.
ended_attempt AS MATERIALIZED (
    SELECT news.at, task.type, coalesce(attempt.agent_id, '') AS agent, coalesce(attempt.model, '') AS model, attempt.outcome = 'failed' AS is_failed,
        attempt.number > 1 AS is_retry, attempt.cost_usd AS cost, attempt.tokens_input AS tokens_in, attempt.tokens_output AS tokens_out
    FROM news
    JOIN lineshaft.attempt ON attempt.task_id = news.task_id AND attempt.epoch = news.epoch AND attempt.ended_at = news.at
        AND 'task.' || attempt.outcome = ANY (news.kinds)
    JOIN lineshaft.task ON task.id = news.task_id
    WHERE news.kinds && '{task.failed,task.rate_limited,task.released,task.waiting,task.cancelled}'
),
paid AS MATERIALIZED (
    SELECT at, type, agent, model, false AS is_failed, is_retry, cost, tokens_in, tokens_out FROM completed WHERE is_attempt
    UNION ALL
    SELECT at, type, agent, model, is_failed, is_retry, cost, tokens_in, tokens_out FROM ended_attempt
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
    FROM paid
    GROUP BY type, agent, model HAVING sum(cost) > 0
),
added AS (
    INSERT INTO lineshaft.tally AS known (name, labels, value)
    SELECT name, labels, value FROM counted
    ON CONFLICT (name, labels) DO UPDATE SET value = known.value + excluded.value
),
day_group AS MATERIALIZED (
    SELECT
        (at AT TIME ZONE 'UTC')::date AS day, type, agent, model, count(*) AS attempts, count(*) FILTER (WHERE is_failed) AS failed,
        count(*) FILTER (WHERE is_retry) AS retries, count(*) FILTER (WHERE cost = 0 AND tokens_in + tokens_out > 0) AS unpriced,
        sum(tokens_in) AS tokens_input, sum(tokens_out) AS tokens_output, sum(cost) AS cost_usd,
        coalesce(sum(cost) FILTER (WHERE is_failed), 0) AS failed_cost_usd, coalesce(sum(cost) FILTER (WHERE is_retry), 0) AS retry_cost_usd
    FROM paid
    GROUP BY 1, type, agent, model
),
-- A day has room for `groups` of them; the rest are one group. Agents without an id of their own are new ones at each start.
room AS MATERIALIZED (
    SELECT days.day, %(groups)s::bigint - (SELECT count(*) FROM lineshaft.cost_day WHERE cost_day.day = days.day AND cost_day.type <> '*') AS free
    FROM (SELECT DISTINCT day FROM day_group) AS days
),
numbered AS MATERIALIZED (
    SELECT day_group.*, known.day IS NOT NULL AS is_known,
        row_number() OVER (PARTITION BY day_group.day, known.day IS NULL ORDER BY day_group.cost_usd DESC, day_group.type) AS no
    FROM day_group
    LEFT JOIN lineshaft.cost_day AS known
        ON known.day = day_group.day AND known.type = day_group.type AND known.agent_id = day_group.agent AND known.model = day_group.model
),
placed AS (
    SELECT numbered.*, numbered.is_known OR numbered.no <= room.free AS has_room
    FROM numbered JOIN room ON room.day = numbered.day
),
added_to_days AS (
    INSERT INTO lineshaft.cost_day AS known (
        day, type, agent_id, model, attempts, failed, retries, unpriced, tokens_input, tokens_output, cost_usd, failed_cost_usd, retry_cost_usd
    )
    SELECT day, CASE WHEN has_room THEN type ELSE '*' END, CASE WHEN has_room THEN agent ELSE '*' END, CASE WHEN has_room THEN model ELSE '*' END,
        sum(attempts), sum(failed), sum(retries), sum(unpriced), sum(tokens_input), sum(tokens_output), sum(cost_usd), sum(failed_cost_usd),
        sum(retry_cost_usd)
    FROM placed
    GROUP BY 1, 2, 3, 4
    ON CONFLICT (day, type, agent_id, model) DO UPDATE SET
        attempts = known.attempts + excluded.attempts, failed = known.failed + excluded.failed, retries = known.retries + excluded.retries,
        unpriced = known.unpriced + excluded.unpriced, tokens_input = known.tokens_input + excluded.tokens_input,
        tokens_output = known.tokens_output + excluded.tokens_output, cost_usd = known.cost_usd + excluded.cost_usd,
        failed_cost_usd = known.failed_cost_usd + excluded.failed_cost_usd, retry_cost_usd = known.retry_cost_usd + excluded.retry_cost_usd
),
-- Only what is recent: after a long time without a count there may be years of events.
added_to_minutes AS (
    INSERT INTO lineshaft.minute AS known (at, completed, failed, dead_lettered, cancelled, priced, cost_usd)
    SELECT date_trunc('minute', at), sum(completed), sum(failed), sum(dead_lettered), sum(cancelled), sum(priced), sum(cost)
    FROM (
        SELECT at, ('task.completed' = ANY (kinds))::integer AS completed, ('task.failed' = ANY (kinds))::integer AS failed,
            ('task.dead_lettered' = ANY (kinds))::integer AS dead_lettered, ('task.cancelled' = ANY (kinds))::integer AS cancelled,
            0 AS priced, 0 AS cost
        FROM news WHERE kinds && '{task.completed,task.failed,task.dead_lettered,task.cancelled}'
        UNION ALL
        SELECT at, 0, 0, 0, 0, 1, cost FROM paid WHERE cost > 0
    ) AS happened
    WHERE at > coalesce(%(now)s::timestamptz, now()) - interval '2 days'
    GROUP BY 1
    ON CONFLICT (at) DO UPDATE SET
        completed = known.completed + excluded.completed, failed = known.failed + excluded.failed,
        dead_lettered = known.dead_lettered + excluded.dead_lettered, cancelled = known.cancelled + excluded.cancelled,
        priced = known.priced + excluded.priced, cost_usd = known.cost_usd + excluded.cost_usd
)
UPDATE lineshaft.tally_place SET since = place.until FROM place RETURNING place.more

-- name: figures_age
-- By event_feed.
SELECT coalesce((
    SELECT greatest(extract(epoch FROM coalesce(%(now)s::timestamptz, now()) - event.at), 0)
    FROM lineshaft.event
    WHERE event.xid >= (SELECT pg_snapshot_xmax(since) FROM lineshaft.tally_place)
    ORDER BY event.xid
    LIMIT 1
), 0)::float8 AS age_sec

-- name: read_tally
SELECT name, labels, value FROM lineshaft.tally
UNION ALL
SELECT 'duplicate', '{}', CASE WHEN is_called THEN last_value ELSE 0 END FROM lineshaft.duplicate_no
ORDER BY name, labels

-- name: forget_old
-- Both tables are small.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
minutes AS (DELETE FROM lineshaft.minute USING clock WHERE minute.at < clock.now - interval '2 days' RETURNING minute.at),
days AS (
    DELETE FROM lineshaft.cost_day USING clock
    WHERE cost_day.day < (clock.now AT TIME ZONE 'UTC')::date - %(keep_days)s::integer
    RETURNING cost_day.day
)
SELECT (SELECT count(*) FROM minutes) + (SELECT count(*) FROM days) AS deleted
