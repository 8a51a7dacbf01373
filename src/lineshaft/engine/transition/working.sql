-- What agents at work ask of the database besides claiming and ending tasks. Used by store/working.py and store/heartbeats.py.

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
