-- name: pause
INSERT INTO lineshaft.pause (type, since) VALUES (%(type)s::text, coalesce(%(now)s::timestamptz, now()))
ON CONFLICT (type) DO NOTHING

-- name: resume
-- Money that was spent before the resume doesn't trigger the velocity limit again.
WITH forgotten AS (DELETE FROM lineshaft.spend_sample WHERE %(type)s::text = '*')
DELETE FROM lineshaft.pause WHERE type = %(type)s::text RETURNING type
