-- name: signal_slowdowns
-- For what met a rate limit: the account that it used; else the model that the task was claimed for, else the agent's first one; else
-- everything, or for a window only the agent. An older signal never overrides a newer one.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
signal AS (
    SELECT
        coalesce(
            'account:' || input.account, 'model:' || coalesce(input.model, instance.models_available[1]),
            CASE WHEN input.is_window THEN 'agent:' || input.agent_id END, '*'
        ) AS key,
        max(input.wait_sec) AS wait_sec, min(input.reason) AS reason
    FROM unnest(
        %(agent_ids)s::text[], %(incarnations)s::integer[], %(models)s::text[], %(accounts)s::text[], %(waits)s::double precision[],
        %(windows)s::boolean[], %(reasons)s::text[]
    ) AS input (agent_id, incarnation, model, account, wait_sec, is_window, reason)
    LEFT JOIN lineshaft.instance ON instance.agent_id = input.agent_id AND instance.incarnation = input.incarnation
    GROUP BY 1
    ORDER BY 1
),
written AS (
    INSERT INTO lineshaft.slowdown AS known (key, signalled_at, until, reason)
    SELECT signal.key, clock.now, clock.now + make_interval(secs => signal.wait_sec), signal.reason
    FROM signal CROSS JOIN clock
    ON CONFLICT (key) DO UPDATE
        SET signalled_at = excluded.signalled_at, until = excluded.until, reason = excluded.reason
        -- What an account can still do in its window is not known before the end of the window.
        WHERE (known.key NOT LIKE 'account:%%' OR known.until < excluded.until)
          AND (known.signalled_at, known.until) < (excluded.signalled_at, excluded.until)
    RETURNING key, until, reason
)
INSERT INTO lineshaft.event (at, kinds, data)
SELECT clock.now, '{signal.slowdown}', jsonb_build_object('key', written.key, 'until', lineshaft.iso(written.until), 'wait', signal.wait_sec)
FROM written JOIN signal ON signal.key = written.key CROSS JOIN clock

-- name: broadcast_slowdown
-- account:NAME, model:NAME, provider:NAME, agent:ID or *.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
written AS (
    INSERT INTO lineshaft.slowdown AS known (key, signalled_at, until, reason)
    SELECT %(key)s::text, clock.now, clock.now + make_interval(secs => %(wait)s::double precision), %(reason)s::text FROM clock
    ON CONFLICT (key) DO UPDATE
        SET signalled_at = excluded.signalled_at, until = excluded.until, reason = excluded.reason
        WHERE (known.signalled_at, known.until) < (excluded.signalled_at, excluded.until)
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

-- name: report_outages
-- Agents whose live processes have accounts, of which none is open, and what has changed since the last look. Read only while there is
-- something to report. Of an agent whose processes are gone, the end is reported at the instant when the first account was to open.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
offered AS MATERIALIZED (
    SELECT DISTINCT instance.agent_id, offer.name
    FROM lineshaft.instance
    CROSS JOIN LATERAL unnest(instance.accounts) AS offer (name)
    WHERE (
            EXISTS (SELECT FROM lineshaft.slowdown, clock WHERE slowdown.key LIKE 'account:%%' AND slowdown.until > clock.now)
            OR EXISTS (SELECT FROM lineshaft.breaker WHERE breaker.key LIKE 'account:%%' AND breaker.state <> 'closed')
            OR EXISTS (SELECT FROM lineshaft.account_outage)
        )
      AND instance.accounts <> '{}' AND
        -- include: instance_liveness
        <> 'offline'
),
fleet AS MATERIALIZED (
    SELECT agent.agent_id, agent.names, lineshaft.open_accounts_1(agent.names, NULL, clock.now) AS open,
        lineshaft.accounts_until_1(agent.names, clock.now) AS until
    FROM (SELECT agent_id, array_agg(name ORDER BY name) AS names FROM offered GROUP BY agent_id) AS agent
    CROSS JOIN clock
),
begun AS (
    INSERT INTO lineshaft.account_outage AS known (agent_id, since, until)
    SELECT fleet.agent_id, clock.now, fleet.until FROM fleet CROSS JOIN clock WHERE fleet.open = '{}' ORDER BY fleet.agent_id
    ON CONFLICT (agent_id) DO UPDATE SET until = excluded.until WHERE known.until IS DISTINCT FROM excluded.until
    -- Without an earlier version of the row it is new.
    RETURNING agent_id, until, xmax = 0 AS is_new
),
over AS (
    DELETE FROM lineshaft.account_outage AS outage
    USING clock
    WHERE NOT EXISTS (SELECT FROM fleet WHERE fleet.agent_id = outage.agent_id AND fleet.open = '{}')
      AND (outage.until <= clock.now OR EXISTS (SELECT FROM fleet WHERE fleet.agent_id = outage.agent_id))
    RETURNING outage.agent_id, outage.since
)
INSERT INTO lineshaft.event (at, kinds, agent_id, data)
SELECT clock.now, '{accounts.closed,alert}'::text[], begun.agent_id,
    jsonb_build_object(
        'accounts', fleet.names, 'until', lineshaft.iso(begun.until), 'message',
        'All accounts of agent ' || begun.agent_id || ' are closed (' || array_to_string(fleet.names, ', ') || '). '
        || coalesce('The first opens at ' || lineshaft.iso(begun.until) || ': its tasks wait until then.', 'Its tasks wait.')
    )
FROM begun JOIN fleet ON fleet.agent_id = begun.agent_id CROSS JOIN clock
WHERE begun.is_new
UNION ALL
SELECT clock.now, '{accounts.opened,alert}'::text[], over.agent_id,
    jsonb_build_object(
        'accounts', coalesce(fleet.open, '{}'), 'since', lineshaft.iso(over.since), 'message',
        'Agent ' || over.agent_id || ' goes on' || coalesce(' with ' || nullif(array_to_string(fleet.open, ', '), ''), '') || ': not all accounts are closed any more.'
    )
FROM over LEFT JOIN fleet ON fleet.agent_id = over.agent_id CROSS JOIN clock
