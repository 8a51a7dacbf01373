-- See events.py for what a window is. Every reading statement returns at least one row, which describes the window. complete: the window
-- has no rows beyond those that were read.
--
-- Visibility is decided by comparing xid with the snapshots, not by what the statement sees: it sees at least as much as `until`, which was
-- taken by it or before it.

-- fragment: window
SELECT
    bounds.until::text,
    (SELECT xid::text FROM lineshaft.event_horizon ORDER BY xid DESC LIMIT 1) AS horizon,
    pg_snapshot_xmax(pg_current_snapshot())::text AS next_xid,

-- fragment: picked
-- Events of a standalone task are written without its DAG, which has no row; those of the DAG are derived from them.
    picked.seq, picked.kinds, picked.at, picked.task_id,
    coalesce(picked.dag_id, task.dag_id) AS dag_id, picked.agent_id, picked.epoch, picked.data,
    CASE WHEN picked.dag_id IS NULL AND %(task_id)s::text IS NULL THEN lineshaft.dag_kind(picked.kinds, picked.epoch) END AS dag_kind,
    CASE
        WHEN picked.kinds && '{dag.completed}' OR (picked.dag_id IS NULL AND picked.epoch > 1 AND picked.kinds && '{task.completed}')
        THEN lineshaft.is_rerun_1(picked.task_id, picked.dag_id, picked.epoch, picked.seq) ELSE false
    END AS rerun,
    task.type,
    CASE WHEN picked.task_id IS NOT NULL THEN task.title ELSE (SELECT dag.title FROM lineshaft.dag WHERE dag.id = picked.dag_id) END AS title
FROM bounds
LEFT JOIN picked ON true
-- OFFSET: one look-up by the primary key for each row of the page, whatever the planner expects.
LEFT JOIN LATERAL (
    SELECT task.dag_id, task.type, task.title FROM lineshaft.task WHERE task.id = picked.task_id OFFSET 0
) AS task ON true
ORDER BY picked.seq

-- fragment: wanted
-- dag_kinds: those of the kinds that may have to be derived, else NULL.
      AND (
        %(dag_id)s::text IS NULL OR dag_id = %(dag_id)s::text
        -- The standalone task that the DAG was virtual for: its id is part of the DAG's (submit/drafts.py).
        OR (dag_id IS NULL AND task_id = ANY (ARRAY(
            SELECT task.id FROM lineshaft.task
            WHERE task.id IN (substr(%(dag_id)s::text, 5), 'task_' || substr(%(dag_id)s::text, 5)) AND task.dag_id = %(dag_id)s::text
        )))
      )
      AND (
        %(kinds)s::text[] IS NULL OR kinds && %(kinds)s::text[]
        OR (%(dag_kinds)s::text[] IS NOT NULL AND dag_id IS NULL AND lineshaft.dag_kind(kinds, epoch) = ANY (%(dag_kinds)s::text[]))
      )

-- fragment: unseen_of_wide_window
      AND pg_visible_in_snapshot(xid, (SELECT until FROM bounds))
      AND pg_visible_in_snapshot(xid, %(since)s::pg_snapshot) IS NOT TRUE
    -- include: wanted
    ORDER BY seq
    LIMIT %(limit)s::bigint
)

-- name: read_now
SELECT pg_current_snapshot()::text AS now

-- name: last_seq
SELECT last_value FROM lineshaft.event_seq_seq

-- name: first_at
-- The time of the first event from a number on, by event_by_seq; NULL: there is none within `span` numbers.
SELECT (
    SELECT at FROM lineshaft.event
    WHERE seq >= %(seq)s::bigint AND seq < %(seq)s::bigint + %(span)s::bigint
    ORDER BY seq
    LIMIT 1
) AS at

-- name: settle
-- Before a cursor relies on `until`: see "Crashes" in events.py. Does nothing if all transactions since `since` have committed; for more
-- than a few the check is as expensive as the commit. since is NULL from the beginning.
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
-- A window of at most `most` rows, by event_feed: the usual case, a reader that keeps up. A larger window is left to read_span, which
-- doesn't sort all of it for every page.
WITH bounds AS MATERIALIZED (SELECT coalesce(%(until)s::pg_snapshot, pg_current_snapshot()) AS until),
-- Two index look-ups: transactions that had not begun when `since` was taken, and those in progress.
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
    -- include: wanted
    ORDER BY seq
    LIMIT %(limit)s::bigint
)
-- include: window
    (SELECT count(*) FROM unseen) <= %(most)s::bigint AS complete,
-- include: picked

-- name: find_first
-- The start of a large window, looked up once, when it is opened.
SELECT min(seq) AS seq FROM (
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
-- A large window, by number. since is NULL from the beginning. Reads at most `span` numbers, so that a filter without matches doesn't
-- read the whole history for one page. The last number of the sequence bounds all rows that `until` sees.
WITH bounds AS MATERIALIZED (SELECT coalesce(%(until)s::pg_snapshot, pg_current_snapshot()) AS until),
picked AS (
    SELECT seq, kinds, at, task_id, dag_id, agent_id, epoch, data
    FROM lineshaft.event
    WHERE seq >= %(seq)s::bigint AND seq < %(seq)s::bigint + %(span)s::bigint
    -- include: unseen_of_wide_window
-- include: window
    %(seq)s::bigint + %(span)s::bigint > (SELECT last_value FROM lineshaft.event_seq_seq) AS complete,
-- include: picked

-- name: read_task
-- A large window, of one task: by event_of_task.
WITH bounds AS MATERIALIZED (SELECT coalesce(%(until)s::pg_snapshot, pg_current_snapshot()) AS until),
picked AS (
    SELECT seq, kinds, at, task_id, dag_id, agent_id, epoch, data
    FROM lineshaft.event
    WHERE task_id = %(task_id)s::text AND seq >= %(seq)s::bigint
    -- include: unseen_of_wide_window
-- include: window
    true AS complete,
-- include: picked
