-- What an operator takes away by hand. Used by store/interventions.py.

-- name: delete_lock
-- Whoever held it goes on, with a fencing number that is not the last one any more.
WITH gone AS (
    DELETE FROM lineshaft.lock WHERE key = %(key)s::text RETURNING key, holder_task_id, agent_id
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, data)
    SELECT coalesce(%(now)s::timestamptz, now()), '{lock.expired}', gone.holder_task_id, gone.agent_id,
        jsonb_build_object('key', gone.key, 'by_hand', true)
    FROM gone
)
SELECT key FROM gone

-- name: delete_slowdown
-- It stays as the latest signal, which is over: an older one that arrives late must not bring it back.
WITH over AS (
    UPDATE lineshaft.slowdown SET signalled_at = clock.now, until = clock.now
    FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
    WHERE key = %(key)s::text AND until > clock.now
    RETURNING key, until
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT until, '{signal.slowdown}', jsonb_build_object('key', key, 'until', until, 'wait', 0, 'by_hand', true) FROM over
)
SELECT key FROM over
