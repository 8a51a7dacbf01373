-- name: has_table
-- From the catalogue tables: to_regclass uses a cache, which may lag behind another process.
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_class
    JOIN pg_catalog.pg_namespace ON pg_namespace.oid = pg_class.relnamespace
    WHERE pg_namespace.nspname = 'lineshaft' AND pg_class.relname = 'migration'
)

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS lineshaft

-- name: create_table
-- applied_at is NULL while a migration without a transaction runs, or after it was cut off.
CREATE TABLE IF NOT EXISTS lineshaft.migration (
    version integer PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    applied_at timestamptz,
    breaks_older boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE lineshaft.migration IS 'Migrations of the schema.';
COMMENT ON COLUMN lineshaft.migration.version IS 'Its number.';
COMMENT ON COLUMN lineshaft.migration.name IS 'Its name.';
COMMENT ON COLUMN lineshaft.migration.checksum IS 'SHA-256 of its file.';
COMMENT ON COLUMN lineshaft.migration.started_at IS 'When it was started.';
COMMENT ON COLUMN lineshaft.migration.applied_at IS 'When it was applied; NULL: not completely.';
COMMENT ON COLUMN lineshaft.migration.breaks_older IS 'Versions that don''t know this migration can''t use the database.'

-- name: list_recorded
SELECT version, name, checksum, applied_at, breaks_older FROM lineshaft.migration ORDER BY version

-- name: record_started
INSERT INTO lineshaft.migration (version, name, checksum, breaks_older)
VALUES (%(version)s::integer, %(name)s::text, %(checksum)s::text, %(breaks_older)s::boolean)
ON CONFLICT (version) DO UPDATE
SET name = excluded.name, checksum = excluded.checksum, breaks_older = excluded.breaks_older, started_at = now()
WHERE migration.applied_at IS NULL

-- name: record_applied
UPDATE lineshaft.migration SET applied_at = clock_timestamp() WHERE version = %(version)s::integer

-- name: try_lock
-- One migrating process at a time. Not a blocking lock: a waiting statement holds a snapshot, and a concurrent index build waits for all
-- snapshots, so the two would wait for each other.
SELECT pg_try_advisory_xact_lock(hashtextextended('lineshaft.migration', 0))

-- name: is_restored
-- A dump restored into another cluster has events of transactions that are still in the future there. By event_feed.
SELECT EXISTS (SELECT FROM lineshaft.event WHERE xid >= pg_snapshot_xmax(pg_current_snapshot()))

-- name: adopt_restored
-- Transaction ids have no meaning in another cluster, and would be reused there. Existing rows get the id 3, which is older than every
-- normal transaction, or 4, if the tally has yet to count them; readers of the feed start again from now.
WITH ahead AS MATERIALIZED (SELECT pg_snapshot_xmax(pg_current_snapshot()) AS xid),
event AS (
    UPDATE lineshaft.event SET xid = CASE WHEN pg_visible_in_snapshot(event.xid, place.since) THEN '3' ELSE '4' END::xid8
    FROM lineshaft.tally_place AS place
    WHERE event.xid > '4'
),
horizon AS (UPDATE lineshaft.event_horizon SET xid = '3' WHERE xid >= (SELECT xid FROM ahead)),
-- The largest number marks a generation that is announced but not open.
generation AS (
    UPDATE lineshaft.generation SET opened_by = '3' WHERE opened_by >= (SELECT xid FROM ahead) AND opened_by <> '9223372036854775807'
),
tally AS (UPDATE lineshaft.tally_place SET since = '4:4:')
DELETE FROM lineshaft.destination

-- name: server_facts
SELECT current_setting('server_version_num')::integer AS version, current_setting('server_encoding') AS encoding, pg_backend_pid() AS pid

-- name: vacuum_pause
-- In the unit of the setting: seconds.
SELECT setting::integer FROM pg_catalog.pg_settings WHERE name = 'autovacuum_naptime'

-- name: limit_lock_wait
-- A migration that waits for a busy table blocks every statement behind it: better to fail with a message.
SELECT set_config('lock_timeout', '10s', true)
