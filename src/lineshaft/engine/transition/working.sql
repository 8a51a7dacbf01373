-- What agents at work ask of the database besides claiming and ending tasks. Used by store/working.py and store/heartbeats.py.

-- name: beat
-- One statement for everything that a process holds: the leases of all its tasks, whoever of its agents holds them, and the presence of
-- the agents themselves. It waits for no row: one that is locked is being moved by somebody just now, and the lease lasts for three
-- intervals. So no heartbeat is ever part of a deadlock.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
input AS MATERIALIZED (
    SELECT * FROM unnest(
        %(ids)s::text[], %(epochs)s::integer[], %(holders)s::text[], %(intervals)s::double precision[], %(progress)s::jsonb[],
        %(costs)s::numeric[]
    ) AS input (id, epoch, holder, interval_sec, progress, cost)
),
free AS MATERIALIZED (
    SELECT live.id
    FROM lineshaft.task_live AS live
    JOIN input ON input.id = live.id
    WHERE live.epoch = input.epoch AND live.agent_id = input.holder AND live.status IN ('RUNNING', 'VALIDATING')
    FOR NO KEY UPDATE OF live SKIP LOCKED
),
beaten AS (
    UPDATE lineshaft.task_live AS live
    SET heartbeat_at = clock.now,
        lease_until = least(clock.now + make_interval(secs => 3 * input.interval_sec), live.limit_at),
        progress = coalesce(input.progress, live.progress),
        -- What it has cost so far only grows: a late heartbeat must not take money back. With the output it is settled.
        attempt_cost_usd = CASE
            WHEN live.status = 'RUNNING' THEN greatest(live.attempt_cost_usd, coalesce(input.cost, 0)) ELSE live.attempt_cost_usd
        END
    FROM free JOIN input ON input.id = free.id, clock
    -- One process may hold two claims of a task: one that it lost, and the one that another agent of it got.
    WHERE live.id = free.id AND live.epoch = input.epoch AND live.agent_id = input.holder
    RETURNING live.id, live.dag_id, live.epoch, live.agent_id, live.lock_key, live.lock_owner, input.interval_sec, input.progress
),
own_lock AS MATERIALIZED (
    SELECT lock.key, beaten.interval_sec
    FROM lineshaft.lock
    JOIN beaten ON beaten.lock_key = lock.key AND lock.holder_task_id = coalesce(beaten.lock_owner, beaten.id)
    FOR NO KEY UPDATE OF lock SKIP LOCKED
),
renewed AS (
    UPDATE lineshaft.lock
    SET expires_at = clock.now + make_interval(secs => greatest(%(lock_ttl)s::double precision, 3 * own_lock.interval_sec))
    FROM own_lock, clock
    WHERE lock.key = own_lock.key
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
    SELECT clock.now, '{task.progress}', beaten.id, beaten.dag_id, beaten.agent_id, beaten.epoch, beaten.progress
    FROM beaten CROSS JOIN clock WHERE beaten.progress IS NOT NULL
),
present AS MATERIALIZED (
    SELECT agent.id
    FROM lineshaft.agent
    JOIN unnest(%(agents)s::text[], %(incarnations)s::bigint[]) AS own (id, incarnation)
      ON agent.id = own.id AND agent.incarnation = own.incarnation
    FOR NO KEY UPDATE OF agent SKIP LOCKED
),
touched AS (
    UPDATE lineshaft.agent
    SET last_heartbeat = clock.now,
        status = CASE WHEN agent.status = 'offline' THEN 'active' ELSE agent.status END::lineshaft.agent_status
    FROM present, clock
    WHERE agent.id = present.id
)
SELECT input.id AS task_id, input.epoch, NULL AS agent_id,
    CASE
        WHEN beaten.id IS NOT NULL THEN 'continue'
        -- Locked by somebody, or not started yet: held all the same.
        WHEN live.epoch = input.epoch AND live.agent_id = input.holder THEN 'continue'
        WHEN ended.status = 'CANCELLED' THEN 'cancel'
        ELSE 'lost'
    END AS answer,
    NULL::integer AS slots,
    NULL::timestamptz AS slowdown_until
FROM input
LEFT JOIN beaten ON beaten.id = input.id AND beaten.epoch = input.epoch
LEFT JOIN lineshaft.task_live AS live ON live.id = input.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = input.id
UNION ALL
-- An agent without an answer is superseded.
SELECT NULL, NULL, agent.id, agent.status::text, agent.max_concurrent_tasks,
    -- include: slowdown_until
FROM lineshaft.agent
JOIN unnest(%(agents)s::text[], %(incarnations)s::bigint[]) AS own (id, incarnation)
  ON agent.id = own.id AND agent.incarnation = own.incarnation

-- name: record_step
-- Fenced by the claim. A step that is recorded already keeps its first result. What the attempt has cost so far is booked in the same
-- transaction, so that a step which is not run again is paid for, however the attempt ends. Answers with what is left to spend.
WITH live AS (
    UPDATE lineshaft.task_live
    SET attempt_cost_usd = greatest(attempt_cost_usd, %(cost_so_far)s::numeric)
    WHERE id = %(id)s::text AND epoch = %(epoch)s::integer AND status = 'RUNNING'
    RETURNING id, epoch, dag_id, agent_id, cost_usd + attempt_cost_usd AS cost
),
recorded AS (
    INSERT INTO lineshaft.step (task_id, name, epoch, recorded_at, cost_usd, data)
    SELECT live.id, %(name)s::text, live.epoch, coalesce(%(now)s::timestamptz, now()), %(cost)s::numeric, %(data)s::jsonb
    FROM live
    ON CONFLICT (task_id, name) DO UPDATE SET name = excluded.name
    RETURNING data
)
SELECT recorded.data,
    task.max_total_cost_usd - live.cost AS task_left,
    agent.budget_usd - agent.spent_usd - agent.reserved_usd AS agent_left,
    dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd AS dag_left
FROM recorded
CROSS JOIN live
JOIN lineshaft.task ON task.id = live.id
LEFT JOIN lineshaft.agent ON agent.id = live.agent_id
LEFT JOIN lineshaft.dag ON dag.id = live.dag_id

-- name: past_attempts
-- What earlier attempts died of, for whoever tries next; since the last revival and before it.
SELECT task_id, number, agent_id, model, outcome, category, error, started_at, ended_at, cost_usd
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome <> 'validating'
ORDER BY task_id, epoch

-- name: leave
-- An agent that stops says so, unless it was superseded.
WITH gone AS (
    UPDATE lineshaft.agent SET status = 'offline'
    WHERE id = %(agent_id)s::text AND incarnation = %(incarnation)s::bigint AND status <> 'offline'
    RETURNING id
)
INSERT INTO lineshaft.event (at, kinds, agent_id)
SELECT coalesce(%(now)s::timestamptz, now()), '{agent.offline}', id FROM gone

-- name: drain
-- An agent that is asked to stop takes no more work.
UPDATE lineshaft.agent SET status = 'draining'
WHERE id = %(agent_id)s::text AND incarnation = %(incarnation)s::bigint AND status = 'active'

-- name: openings
-- Seconds until something comes back by itself: a back-off or a snooze ends, a lease runs out, a guard lets work go on. Those are: a
-- slow-down is over, a breaker may be probed, and, with a daily budget, the next UTC day. And whether one of the guards has done so since then.
SELECT
    extract(epoch FROM (
        SELECT due_at FROM lineshaft.task_live WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL ORDER BY due_at LIMIT 1
    ) - clock.now)::double precision AS due_sec,
    extract(epoch FROM (
        SELECT lease_until FROM lineshaft.task_live WHERE lease_until IS NOT NULL ORDER BY lease_until LIMIT 1
    ) - clock.now)::double precision AS lease_sec,
    extract(epoch FROM least(
        (SELECT min(until) FROM lineshaft.slowdown WHERE until > clock.now),
        (SELECT min(probe_at) FROM lineshaft.breaker WHERE state <> 'closed' AND NOT forced AND probe_at > clock.now),
        CASE WHEN %(daily)s::boolean THEN clock.midnight + interval '24 hours' END
    ) - clock.now)::double precision AS guard_sec,
    clock.now,
    -- One that came and went between two looks is noticed too.
    EXISTS (SELECT FROM lineshaft.slowdown WHERE until > %(since)s::timestamptz AND until <= clock.now)
        OR EXISTS (
            SELECT FROM lineshaft.breaker
            WHERE state <> 'closed' AND NOT forced AND probe_at > %(since)s::timestamptz AND probe_at <= clock.now
        )
        OR coalesce(%(daily)s::boolean AND clock.midnight > %(since)s::timestamptz, false) AS opened
FROM (
    -- Of today, by UTC.
    SELECT now, date_trunc('day', now AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS midnight
    FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS given
) AS clock

-- name: retry_within
-- Seconds until the first retry after a failure among tasks of these types, if it comes soon. Snoozes and rate limits don't count:
-- those come back when somebody else says.
SELECT extract(epoch FROM min(live.due_at) - clock.now)::double precision
FROM lineshaft.task_live AS live
JOIN lineshaft.lane ON lane.id = live.lane_id
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.status = 'RETRYING' AND live.due_at IS NOT NULL AND live.due_at <= clock.now + make_interval(secs => %(within)s::double precision)
  AND live.rate_limits = 0 AND lane.type = ANY (%(types)s::text[])
GROUP BY clock.now

-- name: lanes_of
-- Which lanes hold work of these types, or of any: few, and they never change.
SELECT id, type, required_capabilities, models FROM lineshaft.lane
WHERE %(types)s::text[] IS NULL OR type = ANY (%(types)s::text[])

-- name: finished
-- What became of these: open, or ended as a task or as a DAG, or unknown. A standalone task's DAG has no row: it ends with its task.
SELECT wanted.id,
    CASE
        WHEN dag.id IS NOT NULL THEN CASE WHEN dag.status IN ('completed', 'failed', 'cancelled') THEN 'dag' ELSE 'open' END
        WHEN task.id IS NOT NULL THEN
            CASE WHEN (SELECT true FROM lineshaft.task_end WHERE task_end.id = task.id) THEN 'task' ELSE 'open' END
        WHEN member.id IS NOT NULL THEN
            CASE WHEN (SELECT true FROM lineshaft.task_end WHERE task_end.id = member.id) THEN 'dag' ELSE 'open' END
        ELSE 'unknown'
    END AS state
FROM unnest(%(ids)s::text[]) AS wanted (id)
LEFT JOIN lineshaft.dag ON dag.id = wanted.id
LEFT JOIN lineshaft.task ON task.id = wanted.id
LEFT JOIN LATERAL (
    SELECT task.id FROM lineshaft.task WHERE task.dag_id = wanted.id ORDER BY task.dag_id, task.id LIMIT 1
) AS member ON true

-- name: book_cost
-- What an attempt has cost so far, with something that it will not do again.
UPDATE lineshaft.task_live
SET attempt_cost_usd = greatest(attempt_cost_usd, coalesce(%(cost)s::numeric, 0))
WHERE id = %(id)s::text AND epoch = %(epoch)s::integer AND status = 'RUNNING'

-- name: read_step
SELECT data, epoch FROM lineshaft.step WHERE task_id = %(id)s::text AND name = %(name)s::text

-- name: insert_step
INSERT INTO lineshaft.step (task_id, name, epoch, recorded_at, data)
VALUES (%(id)s::text, %(name)s::text, %(epoch)s::integer, coalesce(%(now)s::timestamptz, now()), %(data)s::jsonb)

-- name: child_ends
SELECT id, status::text, output FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])
