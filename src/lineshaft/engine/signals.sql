-- What an agent is told besides its work. Used by store/signals.py.

-- name: present
-- An agent was heard of. Written only now and then: whoever asks for work every second need not update a row every second.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
touched AS (
    UPDATE lineshaft.agent
    SET last_heartbeat = clock.now,
        status = CASE WHEN agent.status = 'offline' THEN 'active' ELSE agent.status END::lineshaft.agent_status
    FROM clock
    WHERE agent.id = %(agent_id)s::text AND agent.incarnation = %(incarnation)s::bigint
      AND (agent.status = 'offline' OR agent.last_heartbeat < clock.now - interval '10 seconds')
    RETURNING agent.id
)
SELECT
    agent.incarnation,
    CASE WHEN agent.status = 'offline' AND EXISTS (SELECT FROM touched) THEN 'active' ELSE agent.status::text END AS status,
    agent.status = 'offline' AND EXISTS (SELECT FROM touched) AS is_back,
    agent.capabilities,
    agent.types,
    agent.models_available,
    -- include: slowdown_until
    AS slowdown_until
FROM lineshaft.agent CROSS JOIN clock
WHERE agent.id = %(agent_id)s::text
