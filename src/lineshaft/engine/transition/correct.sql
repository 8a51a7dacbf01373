-- Corrections of costs by hand.

-- name: lock_live
SELECT id FROM lineshaft.task_live WHERE id = %(id)s::text FOR NO KEY UPDATE

-- name: lock_ended
SELECT id FROM lineshaft.task_end WHERE id = %(id)s::text FOR NO KEY UPDATE

-- name: lock_disputes
SELECT epoch FROM lineshaft.cost_dispute WHERE task_id = %(id)s::text ORDER BY epoch FOR NO KEY UPDATE

-- name: read_cost
-- The cost of a task, as it is shown.
SELECT task.id, (coalesce(live.cost_usd + live.attempt_cost_usd, ended.cost_usd))::numeric(20, 6) AS cost_usd,
    coalesce(live.epoch, ended.epoch) AS epoch,
    (SELECT dag.id FROM lineshaft.dag WHERE dag.id = task.dag_id) AS dag_id
FROM lineshaft.task
LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
WHERE task.id = %(id)s::text

-- name: read_claims
-- What each claim has cost, with corrections, the newest first. While its agent still holds a task, the row of an attempt repeats what the live
-- row has.
WITH live AS MATERIALIZED (SELECT epoch, agent_id, attempt_cost_usd FROM lineshaft.task_live WHERE id = %(id)s::text AND agent_id IS NOT NULL),
recorded AS MATERIALIZED (
    SELECT attempt.epoch, attempt.agent_id, attempt.cost_usd
    FROM lineshaft.attempt
    WHERE attempt.task_id = %(id)s::text AND NOT EXISTS (SELECT FROM live WHERE live.epoch = attempt.epoch)
),
claim AS (
    SELECT epoch, agent_id, cost_usd FROM recorded
    UNION ALL
    SELECT epoch, agent_id, attempt_cost_usd FROM live
    UNION ALL
    SELECT ended.epoch, ended.agent_id,
        ended.cost_usd - lineshaft.corrected_1(ended.id) - (SELECT coalesce(sum(recorded.cost_usd), 0) FROM recorded)
    FROM lineshaft.task_end AS ended
    WHERE ended.id = %(id)s::text AND ended.status = 'COMPLETED' AND ended.agent_id IS NOT NULL
      AND NOT EXISTS (SELECT FROM recorded WHERE recorded.epoch = ended.epoch)
    UNION ALL
    -- What was corrected before anybody had claimed it.
    SELECT 0, NULL, 0 WHERE EXISTS (SELECT FROM lineshaft.cost_correction AS known WHERE known.task_id = %(id)s::text AND known.epoch = 0)
)
SELECT claim.epoch, claim.agent_id,
    (claim.cost_usd + (
        SELECT coalesce(sum(amount_usd), 0) FROM lineshaft.cost_correction AS known
        WHERE known.task_id = %(id)s::text AND known.epoch = claim.epoch
    ))::numeric(20, 6) AS cost_usd,
    coalesce(
        (
            SELECT dispute.reported_usd - dispute.ceiling_usd - dispute.decided_usd FROM lineshaft.cost_dispute AS dispute
            WHERE dispute.task_id = %(id)s::text AND dispute.epoch = claim.epoch
        ), 0
    )::numeric(20, 6) AS disputed_usd
FROM claim
ORDER BY claim.epoch DESC

-- name: correct
-- Books a correction on the task, and today on agents, the DAG and the day, in this order, as all transitions lock them. How fast money is spent
-- is measured without corrections: nothing was spent now, nor was it before.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
part AS MATERIALIZED (
    SELECT * FROM unnest(%(epochs)s::integer[], %(agent_ids)s::text[], %(amounts)s::numeric[]) AS part (epoch, agent_id, amount)
),
total AS MATERIALIZED (SELECT coalesce(sum(amount), 0) AS amount FROM part),
recorded AS (
    INSERT INTO lineshaft.cost_correction (at, task_id, epoch, agent_id, amount_usd, actor, reason)
    SELECT clock.now, %(id)s::text, part.epoch, part.agent_id, part.amount, %(actor)s::text, %(reason)s::text FROM part CROSS JOIN clock
),
lives AS (
    UPDATE lineshaft.task_live AS live SET cost_usd = live.cost_usd + total.amount FROM total WHERE live.id = %(id)s::text
),
ends AS (
    UPDATE lineshaft.task_end AS ended SET cost_usd = ended.cost_usd + total.amount FROM total WHERE ended.id = %(id)s::text
    RETURNING ended.epoch, ended.status
),
letters AS (
    UPDATE lineshaft.dead_letter SET total_cost_usd = dead_letter.total_cost_usd + total.amount
    FROM ends, total
    WHERE ends.status = 'DEAD_LETTERED' AND dead_letter.task_id = %(id)s::text AND dead_letter.epoch = ends.epoch
),
agents AS (
    UPDATE lineshaft.agent SET spent_usd = agent.spent_usd + share.amount
    FROM (SELECT agent_id, sum(amount) AS amount FROM part GROUP BY agent_id ORDER BY agent_id) AS share
    WHERE agent.id = share.agent_id
    RETURNING agent.id
),
dags AS (
    UPDATE lineshaft.dag SET spent_usd = dag.spent_usd + total.amount
    FROM total WHERE dag.id = %(dag_id)s::text AND (SELECT count(*) FROM agents) >= 0
    RETURNING dag.id
),
day AS (
    INSERT INTO lineshaft.spend AS today (day, spent_usd)
    SELECT (clock.now AT TIME ZONE 'UTC')::date, total.amount FROM total CROSS JOIN clock
    WHERE total.amount <> 0 AND (SELECT count(*) FROM dags) >= 0
    ON CONFLICT (day) DO UPDATE SET spent_usd = today.spent_usd + excluded.spent_usd
    RETURNING today.day
),
samples AS (
    -- What is booked next is compared with the corrected day: the next booking looks (live/velocity.sql).
    UPDATE lineshaft.spend_sample SET total_usd = spend_sample.total_usd + total.amount, day_usd = NULL
    FROM total WHERE (SELECT count(*) FROM day) >= 0
),
decided AS (
    UPDATE lineshaft.cost_dispute AS dispute SET decided_usd = dispute.decided_usd + seen.amount
    FROM unnest(%(disputed_epochs)s::integer[], %(disputed_amounts)s::numeric[]) AS seen (epoch, amount)
    WHERE dispute.task_id = %(id)s::text AND dispute.epoch = seen.epoch
)
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, epoch, data)
SELECT clock.now, '{cost.corrected}', %(id)s::text, %(dag_id)s::text, %(epoch)s::integer, %(data)s::jsonb FROM clock
