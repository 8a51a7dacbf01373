-- Statements that name a partition are composed in partitions.py.

-- name: lock_partitions
-- One process at a time creates or drops partitions. Held until the end of the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.partitions', 0))

-- name: limit_waiting
-- A statement that waits for a table lock blocks all later ones, so it may not wait long. Until the end of the transaction.
SELECT set_config('lock_timeout', %(milliseconds)s::integer::text, true)

-- name: read_clock
SELECT coalesce(%(now)s::timestamptz, now())

-- name: list_partitions
SELECT child.relname
FROM pg_catalog.pg_inherits AS link
JOIN pg_catalog.pg_class AS child ON child.oid = link.inhrelid
WHERE link.inhparent = 'lineshaft.event'::regclass
ORDER BY child.relname

-- name: list_stray_days
-- Days with rows in the default partition. It is empty as long as partitions are created ahead of time.
SELECT DISTINCT date_trunc('day', at, 'UTC') FROM lineshaft.event_default ORDER BY 1

-- name: count_strays
SELECT count(*) FROM (
    SELECT FROM lineshaft.event_default
    WHERE at >= %(start)s::timestamptz AND at < %(end)s::timestamptz
    LIMIT %(limit)s::bigint
) AS stray

-- name: lock_feed
-- Only the table itself: the statements that change partitions lock them.
LOCK TABLE ONLY lineshaft.event IN ACCESS EXCLUSIVE MODE

-- name: delete_strays
-- Retention in the default partition. It has no index by time and is usually empty.
DELETE FROM lineshaft.event_default
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM lineshaft.event_default WHERE at < %(older_than)s::timestamptz LIMIT %(limit)s::bigint
))
RETURNING xid::text

-- name: record_horizon
-- In the transaction that drops, under its lock: readers see either the rows or the horizon.
WITH moved AS (
    UPDATE lineshaft.event_horizon
    SET xid = greatest(xid, %(xid)s::xid8), at = greatest(at, %(at)s::timestamptz)
    RETURNING 1
)
INSERT INTO lineshaft.event_horizon (xid, at)
SELECT %(xid)s::xid8, %(at)s::timestamptz WHERE NOT EXISTS (SELECT FROM moved)
