-- name: lock_dead_letters
-- Every decision about a dead letter locks its row first: of two concurrent decisions, the second finds none, or the first one's result.
SELECT ended.id
FROM lineshaft.task_end AS ended
JOIN lineshaft.dead_letter AS dead ON dead.task_id = ended.id AND dead.revival = ended.revivals
WHERE ended.id = ANY (%(ids)s::text[]) AND ended.status = 'DEAD_LETTERED'
ORDER BY ended.id
FOR UPDATE OF ended, dead

-- name: read_locked_dead_letters
-- Under a newer snapshot than the locks: a virtual DAG may just have got its row.
SELECT ended.id, ended.epoch, dag.id AS dag_id, task.type, task.preset, task.spec, task.inputs, task.max_cost_usd, task.max_duration_sec,
    task.required_capabilities, task.model_preferences, task.fallback_models, dead.reviewed, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
JOIN lineshaft.dead_letter AS dead ON dead.task_id = ended.id AND dead.revival = ended.revivals
LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
WHERE ended.id = ANY (%(ids)s::text[]) AND ended.status = 'DEAD_LETTERED'

-- name: record_review
-- Decides about those of these tasks that are open dead letters; an escalated one is still open. A spec change is recorded with the root
-- task only, not with tasks that are revived along with it.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
decided AS (
    UPDATE lineshaft.dead_letter AS dead
    SET reviewed = true, reviewed_at = clock.now, resolution = %(resolution)s::text, reviewer = %(reviewer)s::text, note = %(note)s::text,
        hidden = dead.hidden OR %(resolution)s::text = 'delete'
    FROM clock
    WHERE dead.task_id = ANY (%(ids)s::text[]) AND (NOT dead.reviewed OR dead.resolution = 'escalate')
    RETURNING dead.task_id, dead.revival, dead.category, dead.error
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
