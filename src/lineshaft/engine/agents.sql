-- Registration, presence, reads and changes.

-- name: lock_registration_key
-- Of two registrations with one key the second waits, and finds the result of the first.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.registration ' || %(key)s::text, 0))

-- name: registered_with
SELECT id FROM lineshaft.agent WHERE registration_key = %(key)s::text

-- name: register_agent
-- A new incarnation supersedes the previous one. The budget is a total over the id's life, set by the first registration that has one:
-- registering again doesn't refill it. A status that was set by hand stays.
INSERT INTO lineshaft.agent AS known (
    id, type, capabilities, types, models_available, version, max_concurrent_tasks, budget_usd, poll_interval_sec, claim_ttl_sec,
    heartbeat_interval_sec, incarnation, registered_at, last_heartbeat, status, silence_reported, registration_key
)
VALUES (
    %(id)s::text, %(type)s::text, %(capabilities)s::text[], %(types)s::text[], %(models)s::text[], %(version)s::text,
    %(max_tasks)s::integer, %(budget)s::numeric, %(poll_interval)s::double precision, %(claim_ttl)s::double precision, %(heartbeat_interval)s::double precision,
    1, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()), 'active',
    false, %(key)s::text
)
ON CONFLICT (id) DO UPDATE
SET type = excluded.type, capabilities = excluded.capabilities, types = excluded.types, models_available = excluded.models_available,
    version = excluded.version, max_concurrent_tasks = excluded.max_concurrent_tasks, budget_usd = coalesce(known.budget_usd, excluded.budget_usd),
    poll_interval_sec = excluded.poll_interval_sec,
    claim_ttl_sec = excluded.claim_ttl_sec, heartbeat_interval_sec = excluded.heartbeat_interval_sec,
    incarnation = known.incarnation + 1, registered_at = excluded.registered_at, last_heartbeat = excluded.last_heartbeat, status = 'active',
    silence_reported = false, registration_key = excluded.registration_key
RETURNING incarnation

-- name: incarnation
SELECT incarnation FROM lineshaft.agent WHERE id = %(agent_id)s::text

-- name: held_by
-- All tasks that an agent holds, through the index of leases: few, and rarely needed.
SELECT id FROM lineshaft.task_live WHERE lease_until IS NOT NULL AND agent_id = %(agent_id)s::text

-- name: read_agents
-- `seen_within`: without agents that have been offline for so many seconds. NULL: all.
SELECT id, type, capabilities, types, models_available, version, max_concurrent_tasks, held AS current_tasks, budget_usd,
    budget_usd - spent_usd - reserved_usd AS budget_remaining_usd, spent_usd, reserved_usd, found.status,
    last_heartbeat, poll_interval_sec, claim_ttl_sec, heartbeat_interval_sec, incarnation, registered_at
FROM lineshaft.agent
CROSS JOIN LATERAL (
    SELECT
    -- include: agent_status
    AS status
) AS found
WHERE (%(ids)s::text[] IS NULL OR id = ANY (%(ids)s::text[]))
  AND (
    %(seen_within)s::double precision IS NULL OR found.status <> 'offline'
    OR last_heartbeat > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(seen_within)s::double precision)
  )
ORDER BY id

-- name: patch_agent
-- Waiting agents look again: there may be more money or more slots, or they may claim again. A process that has left stays offline.
WITH patched AS (
    UPDATE lineshaft.agent
    SET budget_usd = budget_usd + coalesce(%(add_budget)s::numeric, 0),
        set_status = CASE
            WHEN %(status)s::text IS NULL THEN set_status
            ELSE nullif(%(status)s::text, 'active')::lineshaft.agent_status
        END,
        status = CASE WHEN %(status)s::text = 'active' AND status = 'draining' THEN 'active' ELSE status END::lineshaft.agent_status,
        max_concurrent_tasks = coalesce(%(max_tasks)s::integer, max_concurrent_tasks)
    WHERE id = %(id)s::text
    RETURNING id
)
SELECT pg_notify(lineshaft.channel(), '*') FROM patched

-- name: log_agent
INSERT INTO lineshaft.event (at, kinds, agent_id, data)
VALUES (coalesce(%(now)s::timestamptz, now()), ARRAY[%(kind)s::text], %(agent_id)s::text, %(data)s::jsonb)

-- name: mark_offline
-- Agents without a heartbeat for three intervals, and at least 90 s: each silence is reported once.
WITH silent AS (
    UPDATE lineshaft.agent
    SET silence_reported = true
    WHERE NOT silence_reported AND coalesce(set_status, status) <> 'offline'
      AND last_heartbeat < coalesce(%(now)s::timestamptz, now())
          - make_interval(secs => greatest(90, 3 * heartbeat_interval_sec))
    RETURNING id, last_heartbeat
),
-- An agent that stops is offline too; only the event of one that fell silent has its last heartbeat.
logged AS (
    INSERT INTO lineshaft.event (at, kinds, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{agent.offline}', id, jsonb_build_object('last_heartbeat', lineshaft.iso(last_heartbeat)) FROM silent
)
SELECT id FROM silent

-- name: leave
-- An agent that stops is offline at once, and until it registers again; unless it was superseded.
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
    SET last_heartbeat = clock.now, silence_reported = false
    FROM clock
    WHERE agent.id = %(agent_id)s::text AND agent.incarnation = %(incarnation)s::bigint
      AND agent.last_heartbeat < clock.now - interval '10 seconds'
)
SELECT
    agent.incarnation,
    coalesce(agent.set_status, agent.status)::text AS status,
    agent.capabilities,
    agent.types,
    agent.models_available,
    -- include: slowdown_until
    AS slowdown_until
FROM lineshaft.agent CROSS JOIN clock
WHERE agent.id = %(agent_id)s::text
