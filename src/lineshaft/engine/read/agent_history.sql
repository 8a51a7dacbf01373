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

-- name: spending_rates
-- What agents have spent in the last `window`, since their first claim in it: running attempts with the share of their time in it. Among the
-- newest `scan` completions and the newest `scan` other ends of all agents: if there are more, the window is shorter.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
completed AS MATERIALIZED (
    SELECT id, agent_id, claimed_at, ended_at, cost_usd
    FROM lineshaft.task_end, clock
    WHERE ended_at > clock.now - make_interval(secs => %(window_sec)s::double precision)
    ORDER BY ended_at DESC LIMIT %(scan)s::integer
),
attempted AS MATERIALIZED (
    SELECT agent_id, claimed_at, ended_at, cost_usd
    FROM lineshaft.attempt, clock
    WHERE ended_at > clock.now - make_interval(secs => %(window_sec)s::double precision)
    ORDER BY ended_at DESC LIMIT %(scan)s::integer
),
span AS MATERIALIZED (
    SELECT greatest(
        clock.now - make_interval(secs => %(window_sec)s::double precision),
        (SELECT min(ended_at) FROM completed HAVING count(*) = %(scan)s::integer),
        (SELECT min(ended_at) FROM attempted HAVING count(*) = %(scan)s::integer)
    ) AS since
    FROM clock
),
paid AS (
    -- What its earlier attempts haven't cost; a gate may have recorded the last one too.
    SELECT agent_id, claimed_at, cost_usd - (SELECT coalesce(sum(cost_usd), 0) FROM lineshaft.attempt WHERE attempt.task_id = completed.id) AS usd
    FROM completed, span WHERE ended_at >= span.since
    UNION ALL
    SELECT agent_id, claimed_at, cost_usd FROM attempted, span WHERE ended_at >= span.since
    UNION ALL
    SELECT agent_id, claimed_at, attempt_cost_usd * least(
        1, extract(epoch FROM clock.now - span.since) / greatest(extract(epoch FROM clock.now - claimed_at), 1)
    )
    FROM lineshaft.task_live, clock, span WHERE lease_until IS NOT NULL
)
SELECT paid.agent_id, sum(paid.usd) AS usd,
    extract(epoch FROM max(clock.now) - greatest(min(paid.claimed_at), max(span.since)))::double precision AS within_sec
FROM paid, clock, span
WHERE paid.agent_id = ANY (%(agent_ids)s::text[]) AND paid.usd > 0
GROUP BY paid.agent_id
