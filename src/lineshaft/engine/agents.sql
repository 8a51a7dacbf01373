-- Registration, presence, reads and changes of agents and their instances.

-- name: lock_registration_key
-- The second of two registrations with one key waits, and finds the result of the first.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.registration ' || %(key)s::text, 0))

-- name: registered_with
SELECT agent_id, incarnation FROM lineshaft.instance WHERE registration_key = %(key)s::text

-- name: superseded
-- The instances that a registration ends: the one of the same name, and those whose process is gone. A caller can only know the processes
-- of its own machine.
SELECT incarnation, held
FROM lineshaft.instance
WHERE agent_id = %(agent_id)s::text
  AND (name = %(name)s::text OR (name = ANY (%(gone)s::text[]) AND host = %(host)s::text))

-- name: gone_siblings
-- Instances of the same agent and machine as the caller's.
SELECT sibling.incarnation, sibling.held
FROM lineshaft.instance AS own
JOIN lineshaft.instance AS sibling ON sibling.agent_id = own.agent_id AND sibling.host = own.host
WHERE own.agent_id = %(agent_id)s::text AND own.incarnation = %(incarnation)s::integer
  AND sibling.incarnation <> own.incarnation AND sibling.name = ANY (%(gone)s::text[])
  -- One that has left ended as it should.
  AND (sibling.status <> 'offline' OR sibling.held > 0)

-- name: offline_instances
-- All instances of an agent that are not alive.
SELECT incarnation, held
FROM lineshaft.instance
WHERE agent_id = %(agent_id)s::text AND
    -- include: instance_liveness
    = 'offline'

-- name: lock_instances
-- Waits for claims of these instances.
SELECT incarnation, held
FROM lineshaft.instance
WHERE agent_id = %(agent_id)s::text AND incarnation = ANY (%(incarnations)s::integer[])
ORDER BY incarnation
FOR UPDATE

-- name: remove_instances
-- Later claims find nothing.
DELETE FROM lineshaft.instance WHERE agent_id = %(agent_id)s::text AND incarnation = ANY (%(incarnations)s::integer[])

-- name: register_agent
-- The budget is a total over the id's life, set by the first registration that has one: registering again doesn't refill it. A status that
-- was set by hand stays. The row is locked: registrations of one agent take turns.
INSERT INTO lineshaft.agent AS known (id, type, budget_usd, incarnation, registered_at)
VALUES (%(id)s::text, %(type)s::text, %(budget)s::numeric, 1, coalesce(%(now)s::timestamptz, now()))
ON CONFLICT (id) DO UPDATE
SET type = coalesce(excluded.type, known.type), budget_usd = coalesce(known.budget_usd, excluded.budget_usd),
    incarnation = known.incarnation + 1, registered_at = excluded.registered_at, deleted_at = NULL
RETURNING incarnation, set_status::text AS set_status, set_max_tasks

-- name: register_instance
INSERT INTO lineshaft.instance (
    agent_id, incarnation, name, host, version, capabilities, types, models_available, accounts, max_concurrent_tasks, set_max_tasks, set_status,
    poll_interval_sec, claim_ttl_sec, heartbeat_interval_sec, registered_at, last_heartbeat, registration_key
)
VALUES (
    %(id)s::text, %(incarnation)s::integer, %(name)s::text, %(host)s::text, %(version)s::text, %(capabilities)s::text[], %(types)s::text[],
    %(models)s::text[], %(accounts)s::text[], %(max_tasks)s::integer, %(set_max_tasks)s::integer, %(set_status)s::lineshaft.agent_status,
    %(poll_interval)s::double precision, %(claim_ttl)s::double precision, %(heartbeat_interval)s::double precision,
    coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()), %(key)s::text
)

-- name: insert_accounts
-- So that claims only update their rows.
INSERT INTO lineshaft.account (name) SELECT unnest(%(accounts)s::text[]) ORDER BY 1 ON CONFLICT (name) DO NOTHING

-- name: read_accounts
SELECT account.name, lineshaft.open_accounts_1(ARRAY[account.name], NULL, clock.now) <> '{}' AS open,
    lineshaft.accounts_until_1(ARRAY[account.name], clock.now) AS until
FROM unnest(%(accounts)s::text[]) AS account (name)
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ORDER BY account.name

-- name: find_instance
SELECT incarnation FROM lineshaft.instance WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer

-- name: held_by
-- All tasks that instances of an agent hold, through the index of leases: few, and rarely needed.
SELECT id FROM lineshaft.task_live
WHERE lease_until IS NOT NULL AND agent_id = %(agent_id)s::text AND incarnation = ANY (%(incarnations)s::integer[])

-- name: read_agents
SELECT id, type, budget_usd, spent_usd, reserved_usd, set_status::text AS set_status, set_max_tasks, incarnation, registered_at
FROM lineshaft.agent
WHERE deleted_at IS NULL AND (%(ids)s::text[] IS NULL OR id = ANY (%(ids)s::text[]))
ORDER BY id

-- name: read_instances
-- By agent, the newest first. Instances that are offline and hold nothing are soon of no interest: only the newest of them.
SELECT agent_id, name AS instance, incarnation, host, version, liveness AS status, registered_at AS started_at, last_heartbeat,
    coalesce(set_max_tasks, max_concurrent_tasks) AS max_concurrent_tasks, held AS current_tasks, capabilities, types, models_available, accounts,
    poll_interval_sec, claim_ttl_sec, heartbeat_interval_sec, '{}'::text[] AS task_ids
FROM (
    SELECT instance.*,
        -- include: instance_liveness
        AS liveness,
        row_number() OVER (PARTITION BY instance.agent_id ORDER BY instance.incarnation DESC) AS n
    FROM lineshaft.instance
    WHERE (%(ids)s::text[] IS NULL OR instance.agent_id = ANY (%(ids)s::text[]))
      AND (%(incarnation)s::integer IS NULL OR instance.incarnation = %(incarnation)s::integer)
) AS found
WHERE liveness <> 'offline' OR held > 0 OR n <= %(offline)s::integer
ORDER BY agent_id, incarnation DESC

-- name: read_replicas
-- The instances of one agent in groups of those that declare the same: few, however many instances there are.
SELECT liveness AS status, capabilities, types, models_available, accounts, sum(coalesce(set_max_tasks, max_concurrent_tasks)) AS max_concurrent_tasks,
    sum(held) AS current_tasks, max(last_heartbeat) AS last_heartbeat
FROM (
    SELECT instance.*,
        -- include: instance_liveness
        AS liveness
    FROM lineshaft.instance
    WHERE instance.agent_id = %(agent_id)s::text
) AS found
GROUP BY liveness, capabilities, types, models_available, accounts
ORDER BY max(incarnation) DESC

-- name: utilization
-- The share of their time in which the instances of each agent held at least one task.
SELECT agent_id, least(greatest(sum(busy_sec) / nullif(sum(life_sec), 0), 0), 1)::double precision AS share
FROM (
    SELECT instance.agent_id,
        instance.busy_sec + coalesce(extract(epoch FROM clock.now - instance.busy_since)::double precision, 0) AS busy_sec,
        extract(epoch FROM CASE WHEN instance.status = 'offline' THEN instance.last_heartbeat ELSE clock.now END
            - instance.registered_at)::double precision AS life_sec
    FROM lineshaft.instance CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
) AS used
GROUP BY agent_id HAVING sum(life_sec) > 0

-- name: read_held
-- The tasks of each instance, through the index of leases.
SELECT agent_id, incarnation, array_agg(id ORDER BY claimed_at, id) AS task_ids
FROM lineshaft.task_live
WHERE lease_until IS NOT NULL AND (%(ids)s::text[] IS NULL OR agent_id = ANY (%(ids)s::text[]))
GROUP BY agent_id, incarnation

-- name: siblings
-- The next instances of the same agent on the same machine, in a ring: each instance watches a few others, however many there are. One
-- that has left and holds nothing doesn't matter any more.
SELECT sibling.name
FROM lineshaft.instance AS own
JOIN lineshaft.instance AS sibling ON sibling.agent_id = own.agent_id AND sibling.host = own.host
WHERE own.agent_id = %(agent_id)s::text AND own.incarnation = %(incarnation)s::integer AND sibling.incarnation <> own.incarnation
  AND (sibling.status <> 'offline' OR sibling.held > 0)
ORDER BY sibling.incarnation < own.incarnation, sibling.incarnation
LIMIT %(limit)s::integer

-- name: lock_all_instances
-- Before their agent, as claims do.
SELECT incarnation FROM lineshaft.instance WHERE agent_id = %(id)s::text ORDER BY incarnation FOR NO KEY UPDATE

-- name: patch_agent
-- Waiting agents look again: there may be more money or more slots, or they may claim again. A process that has left stays offline.
WITH before AS MATERIALIZED (
    SELECT id, budget_usd, set_status, set_max_tasks FROM lineshaft.agent
    WHERE id = %(id)s::text AND deleted_at IS NULL
    FOR NO KEY UPDATE
),
patched AS (
    UPDATE lineshaft.agent
    SET budget_usd = CASE
            WHEN %(add_budget)s::numeric IS NOT NULL THEN agent.budget_usd + %(add_budget)s::numeric
            WHEN %(sets_budget)s::boolean THEN %(budget)s::numeric
            ELSE agent.budget_usd
        END,
        budget_cut = CASE
            WHEN %(sets_budget)s::boolean THEN coalesce(%(budget)s::numeric < spent_usd + reserved_usd, false)
            WHEN %(add_budget)s::numeric IS NOT NULL THEN budget_cut AND agent.budget_usd + %(add_budget)s::numeric < spent_usd + reserved_usd
            ELSE budget_cut
        END,
        set_status = CASE
            WHEN %(status)s::text IS NULL THEN agent.set_status
            ELSE nullif(%(status)s::text, 'active')::lineshaft.agent_status
        END,
        set_max_tasks = CASE WHEN %(sets_max_tasks)s::boolean THEN %(max_tasks)s::integer ELSE agent.set_max_tasks END
    FROM before
    WHERE agent.id = before.id
    RETURNING agent.id, agent.set_status, agent.set_max_tasks,
        CASE
            WHEN before.budget_usd IS NOT DISTINCT FROM agent.budget_usd THEN '{}'
            ELSE jsonb_build_object('budget_usd', jsonb_build_object('from', before.budget_usd, 'to', agent.budget_usd))
        END
        || CASE
            WHEN before.set_status IS NOT DISTINCT FROM agent.set_status THEN '{}'
            ELSE jsonb_build_object(
                'status', jsonb_build_object('from', coalesce(before.set_status, 'active'), 'to', coalesce(agent.set_status, 'active'))
            )
        END
        || CASE
            WHEN before.set_max_tasks IS NOT DISTINCT FROM agent.set_max_tasks THEN '{}'
            ELSE jsonb_build_object('max_concurrent_tasks', jsonb_build_object('from', before.set_max_tasks, 'to', agent.set_max_tasks))
        END AS difference
),
instances AS (
    UPDATE lineshaft.instance
    SET set_status = patched.set_status, set_max_tasks = patched.set_max_tasks,
        status = CASE
            WHEN %(status)s::text = 'active' AND instance.status = 'draining' THEN 'active' ELSE instance.status
        END::lineshaft.agent_status
    FROM patched
    WHERE instance.agent_id = patched.id AND %(for_instances)s::boolean
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{agent.changed}', id, difference || %(act)s::jsonb FROM patched WHERE difference <> '{}'
)
SELECT pg_notify(lineshaft.channel(), '*') FROM patched

-- name: lock_agent
SELECT id FROM lineshaft.agent WHERE id = %(agent_id)s::text AND deleted_at IS NULL FOR NO KEY UPDATE

-- name: live_instances
SELECT name FROM lineshaft.instance
WHERE agent_id = %(agent_id)s::text AND
    -- include: instance_liveness
    <> 'offline'
ORDER BY incarnation DESC

-- name: delete_agent
UPDATE lineshaft.agent SET deleted_at = coalesce(%(now)s::timestamptz, now()) WHERE id = %(agent_id)s::text

-- name: forget_instances
-- Instances that have been silent for a day and hold nothing.
DELETE FROM lineshaft.instance
USING (
    SELECT agent_id, incarnation FROM lineshaft.instance
    WHERE last_heartbeat < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(silent)s::double precision) AND held = 0
    LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
) AS old
WHERE instance.agent_id = old.agent_id AND instance.incarnation = old.incarnation

-- name: unused_agents
-- Agents without instances, spend and budget that have not registered for long.
SELECT id FROM lineshaft.agent
WHERE budget_usd IS NULL AND spent_usd = 0 AND reserved_usd = 0
  AND greatest(registered_at, deleted_at) < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(unused)s::double precision)
  AND NOT EXISTS (SELECT FROM lineshaft.instance WHERE instance.agent_id = agent.id)
LIMIT %(limit)s::integer
FOR UPDATE SKIP LOCKED

-- name: forget_agents
DELETE FROM lineshaft.agent WHERE id = ANY (%(ids)s::text[])

-- name: forget_counters
-- Metrics have no labels of agents that are gone: what they counted becomes that of no agent in particular, so that sums stay.
WITH gone AS (
    DELETE FROM lineshaft.tally
    WHERE labels[CASE WHEN name = 'heartbeat_missed' THEN 1 ELSE 2 END] = ANY (%(ids)s::text[])
      AND name IN ('completed', 'failed', 'heartbeat_missed', 'cost')
    RETURNING name, labels, value
)
INSERT INTO lineshaft.tally AS known (name, labels, value)
SELECT name, unlabelled, sum(value)
FROM (
    SELECT name, value,
        CASE name WHEN 'heartbeat_missed' THEN '{""}' WHEN 'cost' THEN ARRAY[labels[1], '', labels[3]] ELSE ARRAY[labels[1], ''] END AS unlabelled
    FROM gone
) AS former
GROUP BY name, unlabelled
ON CONFLICT (name, labels) DO UPDATE SET value = known.value + excluded.value

-- name: log_agent
INSERT INTO lineshaft.event (at, kinds, agent_id, data)
VALUES (coalesce(%(now)s::timestamptz, now()), ARRAY[%(kind)s::text], %(agent_id)s::text, %(data)s::jsonb)

-- name: mark_offline
-- Instances without a heartbeat for three intervals, and at least 90 s: each silence is reported once.
WITH silent AS (
    UPDATE lineshaft.instance
    SET silence_reported = true
    WHERE NOT silence_reported AND status <> 'offline' AND set_status IS DISTINCT FROM 'offline'
      AND last_heartbeat < coalesce(%(now)s::timestamptz, now())
          - make_interval(secs => greatest(90, 3 * heartbeat_interval_sec))
    RETURNING agent_id, incarnation, name, last_heartbeat
),
-- An instance that stops is offline too; only the event of one that fell silent has its last heartbeat.
logged AS (
    INSERT INTO lineshaft.event (at, kinds, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{agent.offline}', agent_id,
        jsonb_build_object('instance', name, 'incarnation', incarnation, 'last_heartbeat', lineshaft.iso(last_heartbeat))
    FROM silent
)
SELECT agent_id FROM silent

-- name: leave
-- An instance that stops is offline at once, and permanently; unless it was superseded.
WITH gone AS (
    UPDATE lineshaft.instance SET status = 'offline'
    WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND status <> 'offline'
    RETURNING agent_id, incarnation, name
)
INSERT INTO lineshaft.event (at, kinds, agent_id, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{agent.offline}', agent_id, jsonb_build_object('instance', name, 'incarnation', incarnation)
FROM gone

-- name: drain
-- An instance that is about to stop claims nothing more.
UPDATE lineshaft.instance SET status = 'draining'
WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND status = 'active'

-- name: present
-- An instance asks for work. Written only every ten seconds: a poll per second need not update a row per second.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
touched AS (
    UPDATE lineshaft.instance
    SET last_heartbeat = clock.now, silence_reported = false
    FROM clock
    WHERE instance.agent_id = %(agent_id)s::text AND instance.incarnation = %(incarnation)s::integer
      AND instance.last_heartbeat < clock.now - interval '10 seconds'
)
SELECT
    coalesce(instance.set_status, instance.status)::text AS status,
    instance.capabilities,
    instance.types,
    instance.models_available,
    -- include: slowdown_until
    AS slowdown_until
FROM lineshaft.instance CROSS JOIN clock
WHERE instance.agent_id = %(agent_id)s::text AND instance.incarnation = %(incarnation)s::integer
