-- name: list_file_sources
-- By source_of_files.
SELECT id, name, definition FROM lineshaft.source WHERE kind = 'files' AND NOT paused ORDER BY name

-- name: list_seen
SELECT path, digest FROM lineshaft.file_seen WHERE source_id = %(source_id)s::bigint AND watcher = %(watcher)s::text

-- name: see
-- Nothing if another process has seen the same content in the meantime.
INSERT INTO lineshaft.file_seen AS known (source_id, watcher, path, digest, seen_at)
VALUES (
    %(source_id)s::bigint, %(watcher)s::text, %(path)s::text, %(digest)s::text, coalesce(%(now)s::timestamptz, now())
)
ON CONFLICT (source_id, watcher, path) DO UPDATE SET digest = excluded.digest, seen_at = excluded.seen_at
    WHERE known.digest <> excluded.digest
RETURNING path

-- name: miss
DELETE FROM lineshaft.file_seen
WHERE source_id = %(source_id)s::bigint AND watcher = %(watcher)s::text AND path = %(path)s::text
RETURNING path
