-- fragment: unless_newer
-- The latest signal decides, even if it is the shorter one; an older one never overrides a newer one.
ON CONFLICT (key) DO UPDATE
    SET signalled_at = excluded.signalled_at, until = excluded.until, reason = excluded.reason
    WHERE (known.signalled_at, known.until) < (excluded.signalled_at, excluded.until)

-- name: signal_slowdowns
-- For what met a rate limit: the model that the task was claimed for, else the agent's first one, else everything.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
signal AS (
    SELECT coalesce('model:' || coalesce(input.model, instance.models_available[1]), '*') AS key, max(input.wait_sec) AS wait_sec,
        min(input.reason) AS reason
    FROM unnest(
        %(agent_ids)s::text[], %(incarnations)s::integer[], %(models)s::text[], %(waits)s::double precision[], %(reasons)s::text[]
    ) AS input (agent_id, incarnation, model, wait_sec, reason)
    LEFT JOIN lineshaft.instance ON instance.agent_id = input.agent_id AND instance.incarnation = input.incarnation
    GROUP BY 1
    ORDER BY 1
),
written AS (
    INSERT INTO lineshaft.slowdown AS known (key, signalled_at, until, reason)
    SELECT signal.key, clock.now, clock.now + make_interval(secs => signal.wait_sec), signal.reason
    FROM signal CROSS JOIN clock
    -- include: unless_newer
    RETURNING key, until, reason
)
INSERT INTO lineshaft.event (at, kinds, data)
SELECT clock.now, '{signal.slowdown}', jsonb_build_object('key', written.key, 'until', lineshaft.iso(written.until), 'wait', signal.wait_sec)
FROM written JOIN signal ON signal.key = written.key CROSS JOIN clock

-- name: broadcast_slowdown
-- model:NAME, provider:NAME or *.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
written AS (
    INSERT INTO lineshaft.slowdown AS known (key, signalled_at, until, reason)
    SELECT %(key)s::text, clock.now, clock.now + make_interval(secs => %(wait)s::double precision), %(reason)s::text FROM clock
    -- include: unless_newer
    RETURNING key, signalled_at, until
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT signalled_at, '{signal.slowdown}', jsonb_build_object('key', key, 'until', lineshaft.iso(until), 'wait', %(wait)s::double precision) FROM written
)
SELECT until FROM written

-- name: end_slowdown
-- The row stays as the latest signal: an older one that arrives late must not bring the slowdown back.
WITH over AS (
    UPDATE lineshaft.slowdown SET signalled_at = clock.now, until = clock.now
    FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    WHERE key = %(key)s::text AND until > clock.now
    RETURNING key, until
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT until, '{signal.slowdown}',
        jsonb_build_object('key', key, 'until', lineshaft.iso(until), 'wait', 0, 'by_hand', true) || %(act)s::jsonb
    FROM over
)
SELECT key FROM over
