-- name: lock_instance
-- A claim of this instance that is still being carried out holds the row.
SELECT incarnation FROM lineshaft.instance
WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer
FOR NO KEY UPDATE

-- name: unknown_claims
-- What the instance holds without knowing it.
SELECT id, epoch FROM lineshaft.task_live
WHERE lease_until IS NOT NULL AND agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer
  AND status IN ('CLAIMED', 'RUNNING') AND id <> ALL (%(known)s::text[])
