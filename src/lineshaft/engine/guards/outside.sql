-- name: granted
-- Readers are one holder to others: the first of them names it until the last has gone.
SELECT key, CASE WHEN holder_task_id LIKE 'shared:%%' THEN substr(holder_task_id, 8) ELSE holder_task_id END AS holder_task_id, token
FROM lineshaft.lock
WHERE key = ANY (%(keys)s::text[]) AND key LIKE 'doc:%%' AND holder_task_id NOT LIKE 'outside:%%'
ORDER BY key

-- name: documents
SELECT key FROM lineshaft.lock WHERE key LIKE 'doc:%%' AND holder_task_id NOT LIKE 'outside:%%' ORDER BY key

-- name: is_task
SELECT EXISTS (SELECT FROM lineshaft.task WHERE id = %(id)s::text)

-- name: mark
-- In order of key, as everywhere.
INSERT INTO lineshaft.lock AS held (key, holder_task_id, acquired_at, expires_at)
SELECT wanted.key, wanted.holder, clock.now, clock.now + %(seconds)s::double precision * interval '1 second'
FROM unnest(%(keys)s::text[], %(holders)s::text[]) AS wanted (key, holder)
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ORDER BY wanted.key
ON CONFLICT (key) DO UPDATE SET holder_task_id = excluded.holder_task_id, expires_at = excluded.expires_at
WHERE held.holder_task_id LIKE 'outside:%%'

-- name: unmark
DELETE FROM lineshaft.lock WHERE key = ANY (%(keys)s::text[]) AND holder_task_id LIKE 'outside:%%' RETURNING key
