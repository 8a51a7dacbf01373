-- name: list_observers
-- By source_of_observers.
SELECT name FROM lineshaft.source WHERE kind = 'observer' AND NOT paused ORDER BY name

-- name: lock_observer
SELECT id, created_at, next_tick, paused, name, kind, definition, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.source WHERE name = %(name)s::text FOR NO KEY UPDATE SKIP LOCKED

-- name: rates
-- Ended attempts of the window by group, the latest ones if there are very many: by attempt_by_age and task_end_by_age. Without the work
-- of this source. One row per group, or per tag with the prefix.
WITH since AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(window)s::double precision) AS at
),
ended AS MATERIALIZED (
    (
        SELECT attempt.task_id, attempt.agent_id, attempt.model, true AS failed, attempt.cost_usd AS cost
        FROM lineshaft.attempt
        WHERE attempt.ended_at > (SELECT at FROM since) AND attempt.outcome = 'failed'
        ORDER BY attempt.ended_at DESC LIMIT %(most)s::integer
    )
    UNION ALL
    (
        SELECT task_end.id, task_end.agent_id, task_end.model, false, 0
        FROM lineshaft.task_end
        WHERE task_end.ended_at > (SELECT at FROM since) AND task_end.status = 'COMPLETED'
        ORDER BY task_end.ended_at DESC LIMIT %(most)s::integer
    )
)
SELECT named.name AS name, count(*)::integer AS attempts, count(*) FILTER (WHERE ended.failed)::integer AS failures,
    coalesce(sum(ended.cost) FILTER (WHERE ended.failed), 0) AS cost_usd
FROM ended
JOIN lineshaft.task ON task.id = ended.task_id
CROSS JOIN LATERAL (
    SELECT CASE %(group_by)s::text WHEN 'type' THEN task.type WHEN 'model' THEN ended.model ELSE ended.agent_id END AS name
    WHERE %(group_by)s::text <> 'tag'
    UNION ALL
    SELECT tag FROM unnest(task.tags) AS tag WHERE %(group_by)s::text = 'tag' AND starts_with(tag, %(prefix)s::text)
) AS named
WHERE named.name IS NOT NULL
  AND NOT EXISTS (
      SELECT FROM lineshaft.source_work AS own WHERE own.dag_id = task.dag_id AND own.source_id = %(source_id)s::bigint
  )
GROUP BY named.name
HAVING count(*) >= %(min_attempts)s::integer
   AND count(*) FILTER (WHERE ended.failed) >= %(failure_rate)s::double precision * count(*)
ORDER BY named.name
LIMIT %(groups)s::integer

-- name: cooling
-- Groups that fired lately.
SELECT key FROM lineshaft.source_key
WHERE source_id = %(source_id)s::bigint AND key = ANY (%(keys)s::text[]) AND expires_at > coalesce(%(now)s::timestamptz, now())

-- name: evidence
-- The latest failures of a group.
SELECT failed.task_id, failed.category, failed.error
FROM (
    SELECT attempt.task_id, attempt.agent_id, attempt.model, attempt.category, attempt.error, attempt.ended_at
    FROM lineshaft.attempt
    WHERE attempt.ended_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(window)s::double precision)
      AND attempt.outcome = 'failed'
    ORDER BY attempt.ended_at DESC LIMIT %(most)s::integer
) AS failed
JOIN lineshaft.task ON task.id = failed.task_id
WHERE CASE %(group_by)s::text
    WHEN 'type' THEN task.type = %(name)s::text
    WHEN 'model' THEN failed.model = %(name)s::text
    WHEN 'agent' THEN failed.agent_id = %(name)s::text
    ELSE %(name)s::text = ANY (task.tags)
END
ORDER BY failed.ended_at DESC
LIMIT %(samples)s::integer
