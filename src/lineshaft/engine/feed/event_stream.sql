-- name: read_place
SELECT cursor, seq FROM lineshaft.stream WHERE name = %(name)s::text

-- name: begin
-- A new stream gets events from now on.
INSERT INTO lineshaft.stream (name, cursor) VALUES (%(name)s::text, %(cursor)s::text) ON CONFLICT (name) DO NOTHING

-- name: lock_at
-- Of several servers that read the same events, one publishes them. The others don't wait.
SELECT seq FROM lineshaft.stream WHERE name = %(name)s::text AND cursor = %(known)s::text FOR UPDATE SKIP LOCKED

-- name: move
UPDATE lineshaft.stream
SET cursor = %(cursor)s::text, seq = seq + %(events)s::integer,
    published_at = CASE WHEN %(events)s::integer > 0 THEN coalesce(%(now)s::timestamptz, now()) ELSE published_at END
WHERE name = %(name)s::text AND cursor = %(known)s::text
