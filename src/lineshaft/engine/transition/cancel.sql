-- name: subtree
-- Tasks that are cancelled with some others, each with all that it waits for: children, and with `cascade` tasks that need the success of
-- a cancelled one. A task that has ended has only its children cancelled; with `dead_letters` a dead letter counts as not ended.
WITH RECURSIVE member AS (
    SELECT root.id COLLATE "C" AS id FROM unnest(%(ids)s::text[]) AS root (id)
    UNION
    SELECT below.id
    FROM member
    CROSS JOIN LATERAL (
        SELECT task.id FROM lineshaft.task WHERE task.parent_id = member.id
        UNION ALL
        SELECT edge.task_id FROM lineshaft.edge
        WHERE %(cascade)s::boolean AND edge.depends_on = member.id AND edge.kind = 'success' AND NOT edge.satisfied
          AND (
            EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = member.id)
            OR (
                %(dead_letters)s::boolean
                AND EXISTS (SELECT FROM lineshaft.task_end AS ended WHERE ended.id = member.id AND ended.status = 'DEAD_LETTERED')
            )
          )
    ) AS below
)
SELECT member.id, task.parent_id,
    ARRAY(
        SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = member.id AND edge.kind = 'success' AND NOT edge.satisfied
    ) AS waits_for
FROM member
LEFT JOIN lineshaft.task ON task.id = member.id

-- name: expired_now
SELECT id, lineshaft.iso(deadline) AS deadline
FROM lineshaft.task_live
WHERE id = ANY (%(ids)s::text[]) AND lineshaft.is_expired_1(expires, deadline, coalesce(%(now)s::timestamptz, now()))

-- name: dag_members
-- The tasks of a DAG; of a virtual one, its only task.
SELECT id FROM lineshaft.task WHERE dag_id = %(dag_id)s::text

-- name: cancel_dead_letters
-- DEAD_LETTERED → CANCELLED. Guarded by the row locks that lock_dead_letters holds.
UPDATE lineshaft.task_end AS ended
SET status = 'CANCELLED', ended_at = coalesce(%(now)s::timestamptz, now()), reason = input.reason, category = NULL
FROM unnest(%(ids)s::text[], %(reasons)s::text[]) AS input (id, reason)
WHERE ended.id = input.id AND ended.status = 'DEAD_LETTERED'
