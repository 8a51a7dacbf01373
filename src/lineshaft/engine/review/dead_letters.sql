-- fragment: matching_dead_letters
FROM lineshaft.dead_letter AS dead
JOIN lineshaft.task ON task.id = dead.task_id
LEFT JOIN lineshaft.task_live AS live ON live.id = dead.task_id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = dead.task_id
WHERE (%(reviewed)s::boolean IS NULL OR dead.reviewed = %(reviewed)s::boolean)
  AND (%(hidden)s::boolean OR NOT dead.hidden)
  AND (%(poison_pill)s::boolean IS NULL OR dead.poison_pill = %(poison_pill)s::boolean)
  AND (%(task_ids)s::text[] IS NULL OR dead.task_id = ANY (%(task_ids)s::text[]))
  AND (%(categories)s::text[] IS NULL OR dead.category = ANY (%(categories)s::text[]))
  AND (%(resolutions)s::text[] IS NULL OR dead.resolution = ANY (%(resolutions)s::text[]))
  AND (%(patterns)s::text[] IS NULL OR dead.pattern = ANY (%(patterns)s::text[]))
  AND (%(error_like)s::text IS NULL OR dead.error ILIKE %(error_like)s::text)
  AND (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
  AND (%(dag_ids)s::text[] IS NULL OR task.dag_id = ANY (%(dag_ids)s::text[]))
  AND (%(open)s::boolean IS NOT TRUE OR NOT dead.reviewed OR (dead.resolution = 'escalate' AND ended.status = 'DEAD_LETTERED'))

-- name: list_dead_letters
-- Newest first, by dead_letter_to_review or dead_letter_by_age. A task has one entry for each time it was dead-lettered.
SELECT dead.task_id, dead.revival, dead.dead_lettered_at, dead.poison_pill, dead.reviewed, dead.hidden, dead.total_cost_usd,
    dead.category, dead.error, dead.pattern, dead.resolution, dead.reviewer, dead.note, dead.reviewed_at,
    task.dag_id, task.type, task.title, task.spec, coalesce(live.status, ended.status)::text AS status
-- include: matching_dead_letters
  AND (
    %(after_at)s::timestamptz IS NULL
    OR (dead.dead_lettered_at, dead.task_id, dead.revival)
        < (%(after_at)s::timestamptz, %(after_id)s::text, %(after_revival)s::smallint)
  )
-- With task_ids, sort by an expression that no index has: a planner without statistics would otherwise walk the whole table in order
-- in search of them.
ORDER BY
    CASE WHEN %(task_ids)s::text[] IS NULL THEN dead.dead_lettered_at ELSE dead.dead_lettered_at + interval '0' END DESC,
    dead.task_id DESC, dead.revival DESC
LIMIT %(limit)s::integer

-- name: group_dead_letters
-- Dead letters without a decision, by error pattern, the largest group first. Errors are long: only the newest of each group is fetched.
WITH alike AS MATERIALIZED (
    SELECT dead.pattern, count(*)::integer AS count, count(*) FILTER (WHERE dead.poison_pill)::integer AS poison_pills,
        sum(dead.total_cost_usd)::numeric(20, 6) AS total_cost_usd, min(dead.dead_lettered_at) AS first_at, max(dead.dead_lettered_at) AS last_at,
        array_agg(DISTINCT dead.category ORDER BY dead.category) AS categories, array_agg(DISTINCT task.type ORDER BY task.type) AS types,
        (array_agg(dead.task_id ORDER BY dead.dead_lettered_at DESC, dead.task_id))[:%(samples)s::integer] AS task_ids
    FROM lineshaft.dead_letter AS dead
    JOIN lineshaft.task ON task.id = dead.task_id
    WHERE NOT dead.reviewed
      AND (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
      AND (%(categories)s::text[] IS NULL OR dead.category = ANY (%(categories)s::text[]))
    GROUP BY dead.pattern
    ORDER BY count DESC, dead.pattern
    LIMIT %(limit)s::integer
)
SELECT alike.*, (SELECT dead.error FROM lineshaft.dead_letter AS dead WHERE dead.task_id = alike.task_ids[1] AND NOT dead.reviewed) AS example
FROM alike
ORDER BY alike.count DESC, alike.pattern

-- name: count_dead_letters
-- As list_dead_letters, up to a limit.
SELECT count(*)::integer AS count
FROM (
    SELECT dead.task_id
    -- include: matching_dead_letters
    LIMIT %(limit)s::integer
) AS matching

-- name: recent_dead_letters
-- Dead letters without a decision by pattern and by age in hours, by dead_letter_to_review.
SELECT dead.pattern, greatest(floor(extract(epoch FROM clock.now - dead.dead_lettered_at) / 3600), 0)::integer AS hours_ago, count(*)::integer AS count
FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
JOIN lineshaft.dead_letter AS dead ON dead.dead_lettered_at > clock.now - %(hours)s::integer * interval '1 hour'
JOIN lineshaft.task ON task.id = dead.task_id
WHERE NOT dead.reviewed
  AND dead.pattern = ANY (%(patterns)s::text[])
  AND (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
  AND (%(categories)s::text[] IS NULL OR dead.category = ANY (%(categories)s::text[]))
GROUP BY dead.pattern, hours_ago

-- name: last_review
-- The last decision about a task, and its status now.
SELECT dead.resolution, dead.reviewer, dead.reviewed_at, coalesce(live.status, ended.status)::text AS status
FROM lineshaft.dead_letter AS dead
LEFT JOIN lineshaft.task_live AS live ON live.id = dead.task_id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = dead.task_id
WHERE dead.task_id = %(id)s::text
ORDER BY dead.revival DESC
LIMIT 1

-- name: read_reviews
SELECT task_id, revival, at, resolution, reviewer, note, not_before, spec_before, spec_change
FROM lineshaft.review
WHERE task_id = ANY (%(ids)s::text[])
ORDER BY task_id, no
-- name: change_spec
-- A new spec, with the limits in it. Guarded by the row lock that lock_dead_letters holds.
UPDATE lineshaft.task
SET spec = %(spec)s::jsonb, inputs = %(inputs)s::jsonb, max_cost_usd = %(max_cost_usd)s::numeric, max_duration_sec = %(max_duration_sec)s::double precision,
    required_capabilities = %(required_capabilities)s::text[], model_preferences = %(model_preferences)s::text[],
    fallback_models = %(fallback_models)s::text[], open_limits = open_limits & ~%(fixed_limits)s::smallint
WHERE id = %(id)s::text
