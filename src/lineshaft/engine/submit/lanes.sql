-- name: ensure_lanes
-- The unique index lane_identity decides. DO UPDATE would write a row in vain; find_lanes reads existing lanes under a new snapshot.
INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute, max_cost_usd)
SELECT type, capabilities::text[], models::text[], boost, cost
FROM unnest(
    %(types)s::text[], %(capabilities)s::text[], %(models)s::text[], %(boosts)s::double precision[], %(costs)s::numeric[]
) AS wanted (type, capabilities, models, boost, cost)
ORDER BY type, capabilities, models, boost, cost
ON CONFLICT DO NOTHING

-- name: find_lanes
SELECT wanted.n::integer AS n, lane.id
FROM unnest(
    %(types)s::text[], %(capabilities)s::text[], %(models)s::text[], %(boosts)s::double precision[], %(costs)s::numeric[]
) WITH ORDINALITY AS wanted (type, capabilities, models, boost, cost, n)
JOIN lineshaft.lane
  ON lane.type = wanted.type
 AND lane.required_capabilities = wanted.capabilities::text[]
 AND lane.models = wanted.models::text[]
 AND lane.boost_per_minute = wanted.boost
 AND coalesce(lane.max_cost_usd, -1) = coalesce(wanted.cost, -1)

-- name: wake_lanes
SELECT pg_notify(lineshaft.channel(), %(lanes)s::text)
