-- name: recent_claims
-- Claims of one agent that have ended, the newest first, among the newest `scan` ends and the newest `scan` failures of all agents.
SELECT claim.task_id, task.title, task.type, claim.outcome, claim.category, claim.error, claim.claimed_at, claim.ended_at
FROM (
    (
        SELECT id AS task_id, 'completed' AS outcome, NULL AS category, NULL AS error, claimed_at, ended_at
        FROM (
            SELECT id, agent_id, status, claimed_at, ended_at FROM lineshaft.task_end ORDER BY ended_at DESC LIMIT %(scan)s::integer
        ) AS ended
        WHERE agent_id = %(agent_id)s::text AND status = 'COMPLETED' AND claimed_at IS NOT NULL
        ORDER BY ended_at DESC LIMIT %(limit)s::integer
    )
    UNION ALL
    (
        SELECT task_id, outcome, category, left(error, 1000), claimed_at, ended_at
        FROM (
            SELECT task_id, agent_id, outcome, category, error, claimed_at, ended_at FROM lineshaft.attempt
            WHERE ended_at IS NOT NULL AND outcome <> 'completed'
            ORDER BY ended_at DESC LIMIT %(scan)s::integer
        ) AS failed
        WHERE agent_id = %(agent_id)s::text
        ORDER BY ended_at DESC LIMIT %(limit)s::integer
    )
) AS claim
JOIN lineshaft.task ON task.id = claim.task_id
ORDER BY claim.ended_at DESC, claim.task_id
LIMIT %(limit)s::integer
