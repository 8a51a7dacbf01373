-- name: find_lanes
-- The transaction gets its xid before it reads a lane, so that the janitor knows that it may use it (lane_removal.sql).
SELECT wanted.n::integer AS n, lane.id, lane.retired_at IS NOT NULL AS retired
FROM unnest(
    %(types)s::text[], %(capabilities)s::text[], %(models)s::text[], %(boosts)s::double precision[], %(costs)s::numeric[]
) WITH ORDINALITY AS wanted (type, capabilities, models, boost, cost, n)
JOIN lineshaft.lane
  ON lane.type = wanted.type
 AND lane.required_capabilities = wanted.capabilities::text[]
 AND lane.models = wanted.models::text[]
 AND lane.boost_per_minute = wanted.boost
 AND coalesce(lane.cost_from_usd, -1) = coalesce(wanted.cost, -1)
WHERE (SELECT pg_current_xact_id()) IS NOT NULL

-- name: read_lane
SELECT type, required_capabilities, models, boost_per_minute FROM lineshaft.lane WHERE id = %(id)s::integer

-- name: reuse_lanes
-- Lanes that the janitor has retired; one that it has just deleted is missing from the result.
UPDATE lineshaft.lane SET retired_at = NULL, retired_by = NULL
FROM (
    SELECT id FROM lineshaft.lane WHERE id = ANY (%(ids)s::integer[]) ORDER BY id FOR NO KEY UPDATE
) AS retired
WHERE lane.id = retired.id
RETURNING lane.id

-- name: create_lanes
-- The unique index lane_identity decides. DO UPDATE would write a row in vain; find_lanes reads existing lanes under a new snapshot.
INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute, cost_from_usd)
SELECT type, capabilities::text[], models::text[], boost, cost
FROM unnest(
    %(types)s::text[], %(capabilities)s::text[], %(models)s::text[], %(boosts)s::double precision[], %(costs)s::numeric[]
) AS wanted (type, capabilities, models, boost, cost)
ORDER BY type, capabilities, models, boost, cost
ON CONFLICT DO NOTHING

-- name: count_lanes
-- Lanes with claimable tasks, by one index look-up each, and lanes that may have others, each counted up to a limit.
WITH RECURSIVE waiting AS (
    SELECT generation.no AS generation, first.lane_id
    FROM lineshaft.generation
    CROSS JOIN LATERAL (
        SELECT lane_id FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = generation.no
        ORDER BY lane_id
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT waiting.generation, next.lane_id
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT lane_id FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = waiting.generation AND lane_id > waiting.lane_id
        ORDER BY lane_id
        LIMIT 1
    ) AS next
)
SELECT
    (SELECT count(DISTINCT lane_id) FROM (SELECT lane_id FROM waiting LIMIT 2 * %(limit)s::integer) AS counted) AS waiting,
    (SELECT count(*) FROM (SELECT FROM lineshaft.lane WHERE retired_at IS NULL LIMIT %(most)s::integer) AS counted) AS unretired

-- name: wake_lanes
SELECT
    -- include: notify_lanes
FROM unnest(%(lanes)s::integer[]) AS claimable (lane_id) HAVING count(*) > 0
