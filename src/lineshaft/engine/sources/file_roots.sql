-- name: record_files
INSERT INTO lineshaft.file_seen (source_id, watcher, path, digest, seen_at)
SELECT %(source_id)s::bigint, %(watcher)s::text, file.path, file.digest, coalesce(%(now)s::timestamptz, now())
FROM unnest(%(paths)s::text[], %(digests)s::text[]) AS file (path, digest)
ON CONFLICT (source_id, watcher, path) DO NOTHING

-- name: folders_elsewhere
-- The folders of other watchers, which may be stopped at the moment.
SELECT folders FROM lineshaft.file_watcher WHERE name <> %(server)s::text

-- name: looked
INSERT INTO lineshaft.file_watcher (name, folders, faults, looked_at)
VALUES (%(name)s::text, %(folders)s::text[], %(faults)s::jsonb, coalesce(%(now)s::timestamptz, now()))
ON CONFLICT (name) DO UPDATE SET folders = excluded.folders, faults = excluded.faults, looked_at = excluded.looked_at
