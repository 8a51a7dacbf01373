-- What decides about tasks that failed. Used by store/failing.py.

-- name: failed_agents
-- Who failed at these tasks since they were last revived (poison pills, model/retry.py).
SELECT attempt.task_id, array_agg(DISTINCT attempt.agent_id) AS agents
FROM lineshaft.attempt
JOIN unnest(%(ids)s::text[], %(revivals)s::smallint[]) AS wanted (id, revival)
  ON attempt.task_id = wanted.id AND attempt.revival = wanted.revival
-- One that is being validated is the one that fails now: its agent has let go of the task, but it was that one's output.
WHERE attempt.outcome IN ('failed', 'validating')
GROUP BY attempt.task_id

-- name: children
SELECT id, parent_id FROM lineshaft.task WHERE parent_id = ANY (%(ids)s::text[])
