-- name: failed_instances
-- Instances that failed at these tasks since the last revival (poison pills, model/retry.py).
SELECT attempt.task_id, array_agg(DISTINCT attempt.agent_id || '#' || coalesce(attempt.incarnation::text, '')) AS instances
FROM lineshaft.attempt
JOIN unnest(%(ids)s::text[], %(revivals)s::smallint[]) AS wanted (id, revival)
  ON attempt.task_id = wanted.id AND attempt.revival = wanted.revival
-- An attempt that is being validated is the one that fails now: its agent no longer holds the task, but produced the output.
WHERE attempt.outcome IN ('failed', 'validating')
GROUP BY attempt.task_id

-- name: crash_cost_fraction
SELECT crash_cost_fraction FROM lineshaft.limits

-- name: transaction_time
SELECT coalesce(%(now)s::timestamptz, now())

-- name: other_accounts
-- How long it takes until the instances that held these tasks can go on with another account. NULL: not known.
SELECT input.id AS task_id,
    CASE
        WHEN lineshaft.open_accounts_1(other.names, NULL, clock.now) <> '{}' THEN 0
        ELSE extract(epoch FROM lineshaft.accounts_until_1(other.names, clock.now) - clock.now)
    END::double precision AS wait_sec
FROM unnest(%(ids)s::text[], %(agent_ids)s::text[], %(incarnations)s::integer[], %(accounts)s::text[])
    AS input (id, agent_id, incarnation, account)
JOIN lineshaft.instance ON instance.agent_id = input.agent_id AND instance.incarnation = input.incarnation
CROSS JOIN LATERAL (SELECT array_remove(instance.accounts, input.account) AS names) AS other
CROSS JOIN (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE input.account = ANY (instance.accounts)
