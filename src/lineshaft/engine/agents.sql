-- Registration, presence, reads and changes.

-- name: lock_registration_key
-- Of two registrations with one key the second waits, and finds the result of the first.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.registration ' || %(key)s::text, 0))

-- name: registered_with
SELECT id FROM lineshaft.agent WHERE registration_key = %(key)s::text

-- name: register_agent
-- A new incarnation supersedes the previous one. The budget is a total over the id's life, set by the first registration that has one:
-- registering again doesn't refill it.
INSERT INTO lineshaft.agent AS known (
    id, type, capabilities, types, models_available, version, max_concurrent_tasks, budget_usd, poll_interval_sec, claim_ttl_sec,
    heartbeat_interval_sec, incarnation, registered_at, last_heartbeat, status, registration_key
)
VALUES (
    %(id)s::text, %(type)s::text, %(capabilities)s::text[], %(types)s::text[], %(models)s::text[], %(version)s::text,
    %(max_tasks)s::integer, %(budget)s::numeric, %(poll_interval)s::double precision, %(claim_ttl)s::double precision, %(heartbeat_interval)s::double precision,
    1, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()), 'active',
    %(key)s::text
)
ON CONFLICT (id) DO UPDATE
SET type = excluded.type, capabilities = excluded.capabilities, types = excluded.types, models_available = excluded.models_available,
    version = excluded.version, max_concurrent_tasks = excluded.max_concurrent_tasks, budget_usd = coalesce(known.budget_usd, excluded.budget_usd),
    poll_interval_sec = excluded.poll_interval_sec,
    claim_ttl_sec = excluded.claim_ttl_sec, heartbeat_interval_sec = excluded.heartbeat_interval_sec,
    incarnation = known.incarnation + 1, registered_at = excluded.registered_at, last_heartbeat = excluded.last_heartbeat, status = 'active',
    registration_key = excluded.registration_key
RETURNING incarnation

-- name: incarnation
SELECT incarnation FROM lineshaft.agent WHERE id = %(agent_id)s::text

-- name: held_by
-- All tasks that an agent holds, through the index of leases: few, and rarely needed.
SELECT id FROM lineshaft.task_live WHERE lease_until IS NOT NULL AND agent_id = %(agent_id)s::text

-- name: read_agents
-- `seen_within`: without agents that have been offline for so many seconds. NULL: all.
SELECT id, type, capabilities, types, models_available, version, max_concurrent_tasks, held AS current_tasks, budget_usd,
    budget_usd - spent_usd - reserved_usd AS budget_remaining_usd, spent_usd, reserved_usd, status::text AS status,
    last_heartbeat, poll_interval_sec, claim_ttl_sec, heartbeat_interval_sec, incarnation, registered_at
FROM lineshaft.agent
WHERE (%(ids)s::text[] IS NULL OR id = ANY (%(ids)s::text[]))
  AND (
    %(seen_within)s::double precision IS NULL OR status <> 'offline'
    OR last_heartbeat > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(seen_within)s::double precision)
  )
ORDER BY id

-- name: patch_agent
-- Waiting agents look again: there may be more money, or more slots.
WITH patched AS (
    UPDATE lineshaft.agent
    SET budget_usd = budget_usd + coalesce(%(add_budget)s::numeric, 0),
        status = coalesce(%(status)s::text, status::text)::lineshaft.agent_status,
        max_concurrent_tasks = coalesce(%(max_tasks)s::integer, max_concurrent_tasks)
    WHERE id = %(id)s::text
    RETURNING id
)
SELECT pg_notify('lineshaft', '*') FROM patched

-- name: log_agent
INSERT INTO lineshaft.event (at, kinds, agent_id, data)
VALUES (coalesce(%(now)s::timestamptz, now()), ARRAY[%(kind)s::text], %(agent_id)s::text, %(data)s::jsonb)

-- name: mark_offline
-- Agents without a heartbeat for three intervals, and at least 90 s.
WITH silent AS (
    UPDATE lineshaft.agent
    SET status = 'offline'
    WHERE status <> 'offline'
      AND last_heartbeat < coalesce(%(now)s::timestamptz, now())
          - make_interval(secs => greatest(90, 3 * heartbeat_interval_sec))
    RETURNING id, last_heartbeat
),
-- An agent that stops is offline too; only the event of one that fell silent has its last heartbeat.
logged AS (
    INSERT INTO lineshaft.event (at, kinds, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{agent.offline}', id, jsonb_build_object('last_heartbeat', last_heartbeat) FROM silent
)
SELECT id FROM silent

-- name: leave
-- An agent that stops is offline at once, unless it was superseded.
WITH gone AS (
    UPDATE lineshaft.agent SET status = 'offline'
    WHERE id = %(agent_id)s::text AND incarnation = %(incarnation)s::bigint AND status <> 'offline'
    RETURNING id
)
INSERT INTO lineshaft.event (at, kinds, agent_id)
SELECT coalesce(%(now)s::timestamptz, now()), '{agent.offline}', id FROM gone

-- name: drain
-- An agent that is about to stop claims nothing more.
UPDATE lineshaft.agent SET status = 'draining'
WHERE id = %(agent_id)s::text AND incarnation = %(incarnation)s::bigint AND status = 'active'

-- name: present
-- An agent asks for work. Written only every ten seconds: a poll per second need not update a row per second.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
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
