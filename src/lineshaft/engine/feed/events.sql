-- Reading the feed (store/events.py, which tells what a window is and why it is one). Every reading statement answers with at least
-- one row, to say where the window ends even if nothing is in it. `complete`: the window has nothing beyond what was looked at.
--
-- The columns `xid` of the rows and the snapshots are compared by what a snapshot says, not by what this statement can see: it sees at
-- least as much as `until`, which was taken by it or before it.

-- name: read_now
SELECT pg_current_snapshot()::text

-- name: settle
-- Before a cursor counts what `until` says: see "Crashes" in store/events.py. Nothing to do while all that has finished since `since`
-- has committed; to look at more than a few is no cheaper than the commit. NULL: since the beginning.
SELECT pg_logical_emit_message(true, 'lineshaft', '')
WHERE CASE
    WHEN pg_snapshot_xmax(%(until)s::pg_snapshot)::text::bigint - pg_snapshot_xmax(%(since)s::pg_snapshot)::text::bigint <= 200
    THEN EXISTS (
        SELECT FROM (
            SELECT generate_series(
                pg_snapshot_xmax(%(since)s::pg_snapshot)::text::bigint, pg_snapshot_xmax(%(until)s::pg_snapshot)::text::bigint - 1
            )::text::xid8
            UNION ALL
            SELECT pg_snapshot_xip(%(since)s::pg_snapshot)
        ) AS moved (xid)
        WHERE pg_xact_status(xid) = 'aborted'
    )
    ELSE true
END

-- name: read_recent
-- A window of at most `most` rows, found by transaction (event_feed): the usual case, a reader that keeps up. A larger one is left to
-- read_span, as sorting all of it for every page would take for ever.
WITH bounds AS MATERIALIZED (
    SELECT coalesce(%(until)s::pg_snapshot, pg_current_snapshot()) AS until
),
-- Two index look-ups: transactions that had not begun when `since` was taken, and those that had not ended.
unseen AS MATERIALIZED (
    (
        SELECT seq, kinds, at, task_id, dag_id, agent_id, epoch, data
        FROM lineshaft.event
        WHERE xid >= pg_snapshot_xmax(%(since)s::pg_snapshot)
          AND xid < pg_snapshot_xmax((SELECT until FROM bounds))
          AND pg_visible_in_snapshot(xid, (SELECT until FROM bounds))
          AND seq >= %(seq)s::bigint
        UNION ALL
        SELECT seq, kinds, at, task_id, dag_id, agent_id, epoch, data
        FROM lineshaft.event
        WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(since)s::pg_snapshot)))
          AND pg_visible_in_snapshot(xid, (SELECT until FROM bounds))
          AND seq >= %(seq)s::bigint
    )
    LIMIT %(most)s::bigint + 1
),
picked AS (
    SELECT * FROM unseen
    WHERE (%(task_id)s::text IS NULL OR task_id = %(task_id)s::text)
      AND (%(dag_id)s::text IS NULL OR dag_id = %(dag_id)s::text)
      AND (%(kinds)s::text[] IS NULL OR kinds && %(kinds)s::text[])
    ORDER BY seq
    LIMIT %(limit)s::bigint
)
SELECT
    bounds.until::text,
    (SELECT xid::text FROM lineshaft.event_horizon ORDER BY xid DESC LIMIT 1) AS horizon,
    pg_snapshot_xmax(pg_current_snapshot())::text AS next_xid,
    (SELECT count(*) FROM unseen) <= %(most)s::bigint AS complete,
    picked.*
FROM bounds
LEFT JOIN picked ON true
ORDER BY picked.seq

-- name: find_first
-- Where a large window begins: looked up once, when it is opened.
SELECT min(seq) FROM (
    SELECT seq FROM lineshaft.event
    WHERE xid >= pg_snapshot_xmax(%(since)s::pg_snapshot)
      AND xid < pg_snapshot_xmax(%(until)s::pg_snapshot)
      AND pg_visible_in_snapshot(xid, %(until)s::pg_snapshot)
    UNION ALL
    SELECT seq FROM lineshaft.event
    WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(since)s::pg_snapshot)))
      AND pg_visible_in_snapshot(xid, %(until)s::pg_snapshot)
) AS unseen

-- name: read_span
-- A large window, by number. `since` is NULL from the beginning. At most `span` numbers are looked at, so that a filter that fits
-- nothing doesn't read the whole history for one page. The last number given out bounds every row that `until` shows.
WITH bounds AS MATERIALIZED (
    SELECT coalesce(%(until)s::pg_snapshot, pg_current_snapshot()) AS until
),
picked AS (
    SELECT seq, kinds, at, task_id, dag_id, agent_id, epoch, data
    FROM lineshaft.event
    WHERE seq >= %(seq)s::bigint AND seq < %(seq)s::bigint + %(span)s::bigint
      AND pg_visible_in_snapshot(xid, (SELECT until FROM bounds))
      AND pg_visible_in_snapshot(xid, %(since)s::pg_snapshot) IS NOT TRUE
      AND (%(dag_id)s::text IS NULL OR dag_id = %(dag_id)s::text)
      AND (%(kinds)s::text[] IS NULL OR kinds && %(kinds)s::text[])
    ORDER BY seq
    LIMIT %(limit)s::bigint
)
SELECT
    bounds.until::text,
    (SELECT xid::text FROM lineshaft.event_horizon ORDER BY xid DESC LIMIT 1) AS horizon,
    pg_snapshot_xmax(pg_current_snapshot())::text AS next_xid,
    %(seq)s::bigint + %(span)s::bigint > (SELECT last_value FROM lineshaft.event_seq_seq) AS complete,
    picked.*
FROM bounds
LEFT JOIN picked ON true
ORDER BY picked.seq

-- name: read_task
-- A large window, of one task: by event_of_task, whatever else is in the window.
WITH bounds AS MATERIALIZED (
    SELECT coalesce(%(until)s::pg_snapshot, pg_current_snapshot()) AS until
),
picked AS (
    SELECT seq, kinds, at, task_id, dag_id, agent_id, epoch, data
    FROM lineshaft.event
    WHERE task_id = %(task_id)s::text AND seq >= %(seq)s::bigint
      AND pg_visible_in_snapshot(xid, (SELECT until FROM bounds))
      AND pg_visible_in_snapshot(xid, %(since)s::pg_snapshot) IS NOT TRUE
      AND (%(dag_id)s::text IS NULL OR dag_id = %(dag_id)s::text)
      AND (%(kinds)s::text[] IS NULL OR kinds && %(kinds)s::text[])
    ORDER BY seq
    LIMIT %(limit)s::bigint
)
SELECT
    bounds.until::text,
    (SELECT xid::text FROM lineshaft.event_horizon ORDER BY xid DESC LIMIT 1) AS horizon,
    pg_snapshot_xmax(pg_current_snapshot())::text AS next_xid,
    true AS complete,
    picked.*
FROM bounds
LEFT JOIN picked ON true
ORDER BY picked.seq
