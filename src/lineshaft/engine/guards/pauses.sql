-- name: pause
WITH paused AS (
    INSERT INTO lineshaft.pause (type, since, reason, actor)
    VALUES (%(type)s::text, coalesce(%(now)s::timestamptz, now()), %(act)s::jsonb ->> 'reason', %(act)s::jsonb ->> 'actor')
    ON CONFLICT (type) DO NOTHING
    RETURNING type, since
)
INSERT INTO lineshaft.event (at, kinds, data)
SELECT since, '{queue.paused}', jsonb_build_object('type', type) || %(act)s::jsonb FROM paused

-- name: resume
WITH resumed AS (DELETE FROM lineshaft.pause WHERE type = %(type)s::text RETURNING type, since),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{queue.resumed}',
        jsonb_build_object('type', type, 'since', lineshaft.iso(since)) || %(act)s::jsonb
    FROM resumed
)
SELECT type FROM resumed
