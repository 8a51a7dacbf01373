-- Locks: contents by sha256, then artifacts by id. See the table content.

-- name: begin_upload
-- The row of a content before its object is relied on or written. Waits while the janitor deletes it. A mark is taken away; the object may
-- be gone already.
INSERT INTO lineshaft.content (sha256, size, used_at)
VALUES (%(sha256)s::text, %(size)s::bigint, coalesce(%(now)s::timestamptz, now()))
ON CONFLICT (sha256) DO UPDATE SET used_at = excluded.used_at, deleted_at = NULL,
    incarnation = CASE WHEN content.deleted_at IS NULL THEN content.incarnation ELSE excluded.incarnation END
RETURNING stored, incarnation

-- name: end_upload
-- The object exists. No row: it was deleted since the upload began, and must be written again.
UPDATE lineshaft.content SET stored = true, used_at = coalesce(%(now)s::timestamptz, now())
WHERE sha256 = %(sha256)s::text AND incarnation = %(incarnation)s::bigint AND deleted_at IS NULL
RETURNING sha256

-- name: insert_artifact
-- The same file of the same task again is the same artifact.
INSERT INTO lineshaft.artifact (id, name, size, sha256, content_type, task_id, created_at, used_at)
VALUES (
    %(id)s::text, %(name)s::text, %(size)s::bigint, %(sha256)s::text, %(content_type)s::text, %(task_id)s::text,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
)
ON CONFLICT (task_id, sha256, md5(name)) WHERE task_id IS NOT NULL
DO UPDATE SET content_type = excluded.content_type, used_at = excluded.used_at
RETURNING id, name, size, sha256, content_type, task_id, created_at

-- name: task_exists
SELECT EXISTS (SELECT FROM lineshaft.task WHERE id = %(task_id)s::text)

-- name: holder
SELECT agent_id FROM lineshaft.task_live WHERE id = %(task_id)s::text

-- name: read_artifacts
SELECT id, name, size, sha256, content_type, task_id, created_at FROM lineshaft.artifact WHERE id = ANY (%(ids)s::text[])

-- name: list_artifacts
-- Newest first, by id, which grows with time.
SELECT id, name, size, sha256, content_type, task_id, created_at
FROM lineshaft.artifact
WHERE id < coalesce(%(before)s::text, '~')
ORDER BY id DESC
LIMIT %(limit)s::integer

-- name: list_artifacts_of_task
SELECT id, name, size, sha256, content_type, task_id, created_at
FROM lineshaft.artifact
WHERE task_id = %(task_id)s::text AND id < coalesce(%(before)s::text, '~')
ORDER BY id DESC
LIMIT %(limit)s::integer

-- name: read_old
-- Old artifacts, without locks, from a place in the index on, and whether each is a candidate for deletion. The limit is that of rows read:
-- most old artifacts may belong to outputs. Artifacts of a live task are its drafts. EXISTS would read the whole tables, into a hash.
SELECT
    id, sha256, used_at,
    (SELECT true FROM lineshaft.artifact_ref WHERE artifact_ref.artifact_id = artifact.id LIMIT 1) IS NULL
    AND (SELECT true FROM lineshaft.task_live WHERE task_live.id = artifact.task_id) IS NULL AS is_unused
FROM lineshaft.artifact
WHERE used_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
  AND (used_at, id) > (coalesce(%(after)s::timestamptz, '-infinity'), coalesce(%(after_id)s::text, ''))
ORDER BY used_at, id
LIMIT %(limit)s::integer

-- name: lock_contents
SELECT sha256 FROM lineshaft.content WHERE sha256 = ANY (%(digests)s::text[]) ORDER BY sha256 FOR UPDATE

-- name: lock_artifacts
-- Those that a task begins to refer to at this moment are skipped.
SELECT id FROM lineshaft.artifact WHERE id = ANY (%(ids)s::text[]) ORDER BY id FOR UPDATE SKIP LOCKED

-- name: delete_unreferenced
-- After the locks: a reference that was committed before them is seen.
DELETE FROM lineshaft.artifact
WHERE id = ANY (%(ids)s::text[])
  AND used_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
  AND NOT EXISTS (SELECT FROM lineshaft.artifact_ref WHERE artifact_ref.artifact_id = artifact.id)
  AND NOT EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = artifact.task_id)
RETURNING id

-- name: mark_unused
-- Contents that have no artifact left; they are locked.
UPDATE lineshaft.content SET deleted_at = coalesce(%(now)s::timestamptz, now()), stored = false
WHERE sha256 = ANY (%(digests)s::text[]) AND deleted_at IS NULL
  AND NOT EXISTS (SELECT FROM lineshaft.artifact WHERE artifact.sha256 = content.sha256)
RETURNING sha256

-- name: lock_artifact
SELECT id FROM lineshaft.artifact WHERE id = %(id)s::text FOR UPDATE

-- name: live_referrer
-- A live task that refers to the artifact.
SELECT live.id FROM lineshaft.artifact_ref JOIN lineshaft.task_live AS live ON live.id = artifact_ref.task_id
WHERE artifact_ref.artifact_id = %(id)s::text LIMIT 1

-- name: delete_artifact
WITH refs AS (DELETE FROM lineshaft.artifact_ref WHERE artifact_id = %(id)s::text)
DELETE FROM lineshaft.artifact WHERE id = %(id)s::text

-- name: mark_cut_off
-- Uploads that never ended. One that is still going on meets the mark when it ends.
UPDATE lineshaft.content SET deleted_at = coalesce(%(now)s::timestamptz, now())
FROM (
    SELECT sha256 FROM lineshaft.content
    WHERE NOT stored AND deleted_at IS NULL
      AND used_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
    ORDER BY deleted_at, used_at LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
) AS old
WHERE content.sha256 = old.sha256
RETURNING content.sha256

-- name: marked
SELECT sha256 FROM lineshaft.content
WHERE NOT stored AND deleted_at IS NOT NULL
ORDER BY deleted_at, used_at
LIMIT %(limit)s::integer

-- name: lock_marked
SELECT sha256 FROM lineshaft.content
WHERE sha256 = ANY (%(digests)s::text[]) AND deleted_at IS NOT NULL
ORDER BY sha256
FOR UPDATE SKIP LOCKED

-- name: delete_contents
DELETE FROM lineshaft.content WHERE sha256 = ANY (%(digests)s::text[])
