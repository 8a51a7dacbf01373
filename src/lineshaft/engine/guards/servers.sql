-- name: report_server
-- Servers that have been silent for a day are forgotten.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
forgotten AS (
    DELETE FROM lineshaft.server USING clock WHERE server.seen_at < clock.now - interval '1 day' AND server.id <> %(id)s::text
)
INSERT INTO lineshaft.server (id, name, version, limits, started_at, seen_at)
SELECT %(id)s::text, %(name)s::text, %(version)s::text, %(limits)s::jsonb, clock.now, clock.now FROM clock
ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at

-- name: remove_server
DELETE FROM lineshaft.server WHERE id = %(id)s::text
