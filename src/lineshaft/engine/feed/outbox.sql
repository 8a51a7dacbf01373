-- name: read_destination
SELECT cursor FROM lineshaft.destination WHERE name = %(name)s::text

-- name: begin_destination
-- A new destination gets events from now on.
INSERT INTO lineshaft.destination (name, cursor, read_at)
VALUES (%(name)s::text, %(cursor)s::text, coalesce(%(now)s::timestamptz, now()))
ON CONFLICT (name) DO NOTHING

-- name: advance
-- If several nodes read the same events, one moves the cursor, and only that one stores notices.
UPDATE lineshaft.destination
SET cursor = %(cursor)s::text, read_at = coalesce(%(now)s::timestamptz, now())
WHERE name = %(name)s::text AND cursor = %(known)s::text
RETURNING name

-- name: dags_of_sources
-- Those of these DAGs, also of tasks on their own, that these sources created. By source_work_of_dag.
SELECT DISTINCT work.dag_id
FROM unnest(%(dag_ids)s::text[]) AS wanted (dag_id)
CROSS JOIN LATERAL (SELECT dag_id, source_id FROM lineshaft.source_work WHERE source_work.dag_id = wanted.dag_id OFFSET 0) AS work
JOIN lineshaft.source ON source.id = work.source_id
WHERE source.name = ANY (%(sources)s::text[])

-- name: note
INSERT INTO lineshaft.notification (destination, kind, body, noted_at, due_at)
SELECT %(name)s::text, input.kind, input.body, clock.now, clock.now
FROM unnest(%(kinds)s::text[], %(bodies)s::jsonb[]) WITH ORDINALITY AS input (kind, body, n),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ORDER BY input.n

-- name: count_waiting
-- Up to a limit, by notification_waiting.
SELECT count(*)::integer AS waiting
FROM (SELECT FROM lineshaft.notification WHERE destination = %(name)s::text AND done_at IS NULL LIMIT %(most)s::integer) AS waiting

-- name: lock_destination
-- One node at a time selects what to send; the others don't wait.
SELECT name FROM lineshaft.destination WHERE name = %(name)s::text FOR UPDATE SKIP LOCKED

-- name: waiting
-- Due notices, some of each kind: many of one kind must not hide the others. By notification_waiting.
SELECT due.id, due.kind, due.message
FROM unnest(%(kinds)s::text[]) AS wanted (kind)
CROSS JOIN LATERAL (
    SELECT id, kind, message
    FROM lineshaft.notification
    WHERE destination = %(name)s::text AND kind = wanted.kind AND done_at IS NULL
      AND due_at <= coalesce(%(now)s::timestamptz, now())
    ORDER BY id
    LIMIT %(most)s::integer
) AS due

-- name: sent_lately
-- Messages of each kind that were first sent within the throttle's window. By notification_sent.
SELECT kind, count(DISTINCT message)::integer AS messages
FROM lineshaft.notification
WHERE destination = %(name)s::text AND sent_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(window)s::double precision)
GROUP BY kind

-- name: take
-- Assigns notices to messages. If the sender dies, they are due again when the lease expires.
UPDATE lineshaft.notification AS notification
SET message = input.message, tries = least(notification.tries + 1, 32767), sent_at = coalesce(notification.sent_at, clock.now),
    due_at = clock.now + make_interval(secs => %(lease)s::double precision)
FROM unnest(%(ids)s::bigint[], %(messages)s::bigint[]) AS input (id, message),
    (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE notification.id = input.id AND notification.done_at IS NULL
RETURNING notification.id, notification.message, notification.tries, notification.body

-- name: delivered
-- Unless the lease expired and another node has taken the message.
UPDATE lineshaft.notification
SET done_at = coalesce(%(now)s::timestamptz, now()), last_error = NULL
WHERE message = %(message)s::bigint AND tries = %(tries)s::smallint AND done_at IS NULL

-- name: failed
-- Due again after the delay; without one, given up.
UPDATE lineshaft.notification
SET due_at = coalesce(clock.now + make_interval(secs => %(delay)s::double precision), due_at), last_error = %(error)s::text,
    done_at = CASE WHEN %(delay)s::double precision IS NULL THEN clock.now END, given_up = %(delay)s::double precision IS NULL
FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE message = %(message)s::bigint AND tries = %(tries)s::smallint AND done_at IS NULL

-- name: forget
-- Notices that were delivered or given up long ago. By notification_done.
DELETE FROM lineshaft.notification
WHERE id = ANY (ARRAY(
    SELECT id FROM lineshaft.notification
    WHERE done_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
    ORDER BY done_at
    LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
))
