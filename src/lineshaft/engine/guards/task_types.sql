-- What agents declare about types, what people set, and what follows from both.

-- name: lock_types
-- Changes take turns: the highest revision must belong to the last one that commits.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.types', 0))

-- name: declared_by
SELECT type, agent_id, version, defaults FROM lineshaft.type_declaration WHERE agent_id = %(agent_id)s::text

-- name: declare
INSERT INTO lineshaft.type_declaration AS known (type, agent_id, version, defaults, declared_at)
SELECT new.type, %(agent_id)s::text, %(running)s::text, new.defaults, coalesce(%(now)s::timestamptz, now())
FROM unnest(%(types)s::text[], %(defaults)s::jsonb[]) AS new (type, defaults)
ORDER BY new.type
ON CONFLICT (type, agent_id, version) DO UPDATE SET defaults = excluded.defaults, declared_at = excluded.declared_at

-- name: withdraw
DELETE FROM lineshaft.type_declaration AS known
USING unnest(%(agents)s::text[], %(types)s::text[], %(versions)s::text[]) AS old (agent_id, type, version)
WHERE known.agent_id = old.agent_id AND known.type = old.type AND known.version = old.version

-- name: ended
-- Declarations of versions that no live instance has, while one of the same agent has another; `running` is about to be one. Those of deleted
-- agents too. Of one agent, or of all.
SELECT known.agent_id, known.type, known.version
FROM lineshaft.type_declaration AS known
WHERE (%(agent_id)s::text IS NULL OR known.agent_id = %(agent_id)s::text)
  AND known.version IS DISTINCT FROM %(running)s::text
  AND NOT EXISTS (
      SELECT FROM lineshaft.instance
      WHERE instance.agent_id = known.agent_id AND coalesce(instance.version, '') = known.version AND
          -- include: instance_liveness
          <> 'offline'
  )
  AND (
      %(running)s::text IS NOT NULL
      OR NOT EXISTS (SELECT FROM lineshaft.agent WHERE agent.id = known.agent_id AND agent.deleted_at IS NULL)
      OR EXISTS (
          SELECT FROM lineshaft.type_declaration AS other
          JOIN lineshaft.instance ON instance.agent_id = other.agent_id AND coalesce(instance.version, '') = other.version
          WHERE other.agent_id = known.agent_id AND other.version <> known.version AND
              -- include: instance_liveness
              <> 'offline'
      )
  )

-- name: declarations
-- What agents declare for these types, or for all.
SELECT type, agent_id, version, defaults FROM lineshaft.type_declaration
WHERE %(types)s::text[] IS NULL OR type = ANY (%(types)s::text[])
ORDER BY type, agent_id, declared_at DESC

-- name: read_types
SELECT type, limits, set_by_hand FROM lineshaft.task_type WHERE %(types)s::text[] IS NULL OR type = ANY (%(types)s::text[])

-- name: write_type
INSERT INTO lineshaft.task_type AS known (type, limits, set_by_hand, revision, changed_at)
VALUES (
    %(type)s::text, %(limits)s::jsonb, %(set_by_hand)s::jsonb, coalesce((SELECT max(revision) FROM lineshaft.task_type), 0) + 1,
    coalesce(%(now)s::timestamptz, now())
)
ON CONFLICT (type) DO UPDATE
SET limits = excluded.limits, set_by_hand = excluded.set_by_hand, revision = excluded.revision, changed_at = excluded.changed_at

-- name: log_type
INSERT INTO lineshaft.event (at, kinds, agent_id, data)
VALUES (coalesce(%(now)s::timestamptz, now()), '{type.changed}', %(agent_id)s::text, %(data)s::jsonb)

-- name: served
-- The types that live instances name, with their agents.
SELECT type, array_agg(DISTINCT agent_id ORDER BY agent_id) AS agents
FROM (
    SELECT instance.agent_id, unnest(instance.types) AS type
    FROM lineshaft.instance
    WHERE
        -- include: instance_liveness
        <> 'offline'
) AS live
GROUP BY type

-- name: submitted
-- The types of tasks that wait or ran within the last hours; the index of lanes begins with the type.
SELECT DISTINCT type FROM lineshaft.lane

-- name: note_uncapped
-- Once for each agent and type, whichever process is first.
INSERT INTO lineshaft.uncapped_claim (agent_id, type, first_at)
SELECT %(agent_id)s::text, new.type, coalesce(%(now)s::timestamptz, now())
FROM unnest(%(types)s::text[]) AS new (type)
ON CONFLICT DO NOTHING
RETURNING type

-- name: uncapped
-- Where it is still so: the agent has a budget, and neither the type nor the installation has a limit.
SELECT uncapped.agent_id, uncapped.type, uncapped.first_at
FROM lineshaft.uncapped_claim AS uncapped
JOIN lineshaft.agent ON agent.id = uncapped.agent_id AND agent.budget_usd IS NOT NULL AND agent.deleted_at IS NULL
LEFT JOIN lineshaft.task_type AS kind ON kind.type = uncapped.type
CROSS JOIN lineshaft.limits
WHERE limits.default_max_cost_usd IS NULL AND kind.limits ->> 'max_cost_usd' IS NULL
ORDER BY uncapped.agent_id, uncapped.type
LIMIT %(limit)s::integer
