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
