-- The review desk: what lies on it, and what people decide. Used by store/deadletters.py, store/cancelling.py and store/reviving.py.

-- name: lock_letters
-- Those of these tasks that are dead letters, with what was last decided about them. Whoever revives or cancels one locks this row first: of
-- two that decide at once, the second finds none, or the first one's decision.
SELECT ended.id, ended.epoch, dag.id AS dag_id, task.type, task.preset, task.spec, task.max_cost_usd, task.max_duration_sec,
    task.required_capabilities, task.model_preferences, task.fallback_models, letter.reviewed, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
JOIN lineshaft.dead_letter AS letter ON letter.task_id = ended.id AND letter.revival = ended.revivals
LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
WHERE ended.id = ANY (%(ids)s::text[]) AND ended.status = 'DEAD_LETTERED'
ORDER BY ended.id
FOR UPDATE OF ended, letter

-- name: cancel_ends
-- DEAD_LETTERED → CANCELLED. Guarded by the row locks that lock_letters holds.
UPDATE lineshaft.task_end AS ended
SET status = 'CANCELLED', ended_at = coalesce(%(now)s::timestamptz, now()), reason = input.reason, category = NULL
FROM unnest(%(ids)s::text[], %(reasons)s::text[]) AS input (id, reason)
WHERE ended.id = input.id AND ended.status = 'DEAD_LETTERED'

-- name: record_review
-- What was decided about those of these tasks that lie on the desk. One that was escalated still does. A change of spec is told with the
-- task that it was made for, not with those that come along.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
decided AS (
    UPDATE lineshaft.dead_letter AS letter
    SET reviewed = true, reviewed_at = clock.now, resolution = %(resolution)s::text, reviewer = %(reviewer)s::text, note = %(note)s::text,
        hidden = letter.hidden OR %(resolution)s::text = 'delete'
    FROM clock
    WHERE letter.task_id = ANY (%(ids)s::text[]) AND (NOT letter.reviewed OR letter.resolution = 'escalate')
    RETURNING letter.task_id, letter.revival, letter.category, letter.error
),
written AS (
    INSERT INTO lineshaft.review (at, task_id, revival, resolution, reviewer, note, not_before, spec_before, spec_change)
    SELECT clock.now, decided.task_id, decided.revival, %(resolution)s::text, %(reviewer)s::text, %(note)s::text, %(not_before)s::timestamptz,
        CASE WHEN decided.task_id = %(root)s::text THEN %(spec_before)s::jsonb END,
        CASE WHEN decided.task_id = %(root)s::text THEN %(spec_change)s::jsonb END
    FROM decided CROSS JOIN clock
    ORDER BY decided.task_id
)
SELECT task_id, category, left(error, 300) AS error FROM decided

-- name: last_review
-- What was decided last about a task, and where it stands.
SELECT letter.resolution, letter.reviewer, letter.reviewed_at, coalesce(live.status, ended.status)::text AS status
FROM lineshaft.dead_letter AS letter
LEFT JOIN lineshaft.task_live AS live ON live.id = letter.task_id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = letter.task_id
WHERE letter.task_id = %(id)s::text
ORDER BY letter.revival DESC
LIMIT 1

-- name: change_spec
-- Another spec, with the limits that stand in it. Guarded by the row lock that lock_letters holds.
UPDATE lineshaft.task
SET spec = %(spec)s::jsonb, max_cost_usd = %(max_cost_usd)s::numeric, max_duration_sec = %(max_duration_sec)s::double precision,
    required_capabilities = %(required_capabilities)s::text[], model_preferences = %(model_preferences)s::text[],
    fallback_models = %(fallback_models)s::text[]
WHERE id = %(id)s::text

-- name: list_letters
-- Newest first, by dead_letter_to_review or dead_letter_by_age. Each time a task came here is an entry of its own.
SELECT letter.task_id, letter.revival, letter.dead_lettered_at, letter.poison_pill, letter.reviewed, letter.hidden, letter.total_cost_usd,
    letter.category, letter.error, letter.pattern, letter.resolution, letter.reviewer, letter.note, letter.reviewed_at,
    task.dag_id, task.type, task.title, task.spec, coalesce(live.status, ended.status)::text AS status
FROM lineshaft.dead_letter AS letter
JOIN lineshaft.task ON task.id = letter.task_id
LEFT JOIN lineshaft.task_live AS live ON live.id = letter.task_id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = letter.task_id
WHERE (%(reviewed)s::boolean IS NULL OR letter.reviewed = %(reviewed)s::boolean)
  AND (%(hidden)s::boolean OR NOT letter.hidden)
  AND (%(poison_pill)s::boolean IS NULL OR letter.poison_pill = %(poison_pill)s::boolean)
  AND (%(task_ids)s::text[] IS NULL OR letter.task_id = ANY (%(task_ids)s::text[]))
  AND (%(categories)s::text[] IS NULL OR letter.category = ANY (%(categories)s::text[]))
  AND (%(resolutions)s::text[] IS NULL OR letter.resolution = ANY (%(resolutions)s::text[]))
  AND (%(patterns)s::text[] IS NULL OR letter.pattern = ANY (%(patterns)s::text[]))
  AND (%(error_like)s::text IS NULL OR letter.error ILIKE %(error_like)s::text)
  AND (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
  AND (%(dag_ids)s::text[] IS NULL OR task.dag_id = ANY (%(dag_ids)s::text[]))
  AND (%(open)s::boolean IS NOT TRUE OR NOT letter.reviewed OR (letter.resolution = 'escalate' AND ended.status = 'DEAD_LETTERED'))
  AND (
    %(after_at)s::timestamptz IS NULL
    OR (letter.dead_lettered_at, letter.task_id, letter.revival)
        < (%(after_at)s::timestamptz, %(after_id)s::text, %(after_revival)s::smallint)
  )
-- Named ones are found by their ids and sorted: a planner that knows nothing of the table would walk through all of it in order, in search
-- of them. So their order is one that no index has.
ORDER BY
    CASE WHEN %(task_ids)s::text[] IS NULL THEN letter.dead_lettered_at ELSE letter.dead_lettered_at + interval '0' END DESC,
    letter.task_id DESC, letter.revival DESC
LIMIT %(limit)s::integer

-- name: group_letters
-- What nobody has looked at, by like error: the largest group first. Errors are long: only the newest of each group is fetched.
WITH alike AS MATERIALIZED (
    SELECT letter.pattern, count(*)::integer AS count, count(*) FILTER (WHERE letter.poison_pill)::integer AS poison_pills,
        sum(letter.total_cost_usd)::numeric(14, 6) AS total_cost_usd, min(letter.dead_lettered_at) AS first_at, max(letter.dead_lettered_at) AS last_at,
        array_agg(DISTINCT letter.category ORDER BY letter.category) AS categories, array_agg(DISTINCT task.type ORDER BY task.type) AS types,
        (array_agg(letter.task_id ORDER BY letter.dead_lettered_at DESC, letter.task_id))[:%(samples)s::integer] AS task_ids
    FROM lineshaft.dead_letter AS letter
    JOIN lineshaft.task ON task.id = letter.task_id
    WHERE NOT letter.reviewed
      AND (%(types)s::text[] IS NULL OR task.type = ANY (%(types)s::text[]))
      AND (%(categories)s::text[] IS NULL OR letter.category = ANY (%(categories)s::text[]))
    GROUP BY letter.pattern
    ORDER BY count DESC, letter.pattern
    LIMIT %(limit)s::integer
)
SELECT alike.*, (SELECT letter.error FROM lineshaft.dead_letter AS letter WHERE letter.task_id = alike.task_ids[1] AND NOT letter.reviewed) AS example
FROM alike
ORDER BY alike.count DESC, alike.pattern

-- name: read_reviews
-- All decisions about these tasks, in order.
SELECT task_id, revival, at, resolution, reviewer, note, not_before, spec_before, spec_change
FROM lineshaft.review
WHERE task_id = ANY (%(ids)s::text[])
ORDER BY task_id, no
