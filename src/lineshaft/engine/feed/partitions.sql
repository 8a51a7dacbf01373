-- Partitions of lineshaft.event (store/partitions.py). What names a partition is composed there; the rest is here.

-- name: lock_partitions
-- One at a time makes or drops partitions. Held until the end of the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.partitions', 0))

-- name: limit_waiting
-- Whoever waits for a table lock makes everybody wait who comes after: not for long. Until the end of the transaction.
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
-- Days of which rows went to the default partition, as there was no other. It is empty as long as partitions are made ahead.
SELECT DISTINCT date_trunc('day', at, 'UTC') FROM lineshaft.event_default ORDER BY 1

-- name: count_strays
-- Up to one more than may be moved.
SELECT count(*) FROM (
    SELECT FROM lineshaft.event_default
    WHERE at >= %(start)s::timestamptz AND at < %(end)s::timestamptz
    LIMIT %(limit)s::bigint
) AS stray

-- name: lock_feed
-- Only the table itself: its partitions are locked by what is done to them.
LOCK TABLE ONLY lineshaft.event IN ACCESS EXCLUSIVE MODE

-- name: delete_strays
-- Retention for rows that no other partition took. By position: there is no index by time, and there are none to look for as a rule.
WITH gone AS (
    DELETE FROM lineshaft.event_default
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM lineshaft.event_default WHERE at < %(older_than)s::timestamptz LIMIT %(limit)s::bigint
    ))
    RETURNING xid
)
SELECT count(*), (SELECT xid::text FROM gone ORDER BY xid DESC LIMIT 1) FROM gone

-- name: record_horizon
-- In the transaction that drops, under its lock: readers see the rows, or that they are gone.
WITH moved AS (
    UPDATE lineshaft.event_horizon
    SET xid = greatest(xid, %(xid)s::xid8), at = greatest(at, %(at)s::timestamptz)
    RETURNING 1
)
INSERT INTO lineshaft.event_horizon (xid, at)
SELECT %(xid)s::xid8, %(at)s::timestamptz WHERE NOT EXISTS (SELECT FROM moved)
