-- name: dispute
-- Records reports above the ceiling of their claim, and returns these claims with their ceilings. A claim that never was, or that left no row,
-- is not among them: nothing is booked for it either.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
claim AS MATERIALIZED (
    SELECT input.id, input.epoch, input.cost, holder.agent_id,
        (SELECT dag.id FROM lineshaft.dag WHERE dag.id = task.dag_id) AS dag_id,
        coalesce(known.ceiling_usd, lineshaft.cost_ceiling_1(task.max_cost_usd, limits.default_max_cost_usd)) AS ceiling,
        (known.reported_usd - known.ceiling_usd > known.decided_usd) IS TRUE AS is_open
    FROM (
        SELECT id, epoch, max(cost) AS cost
        FROM unnest(%(ids)s::text[], %(epochs)s::integer[], %(costs)s::numeric[]) AS report (id, epoch, cost)
        GROUP BY id, epoch
    ) AS input
    JOIN lineshaft.task ON task.id = input.id
    CROSS JOIN lineshaft.limits
    CROSS JOIN LATERAL (
        SELECT coalesce(
            (SELECT live.agent_id FROM lineshaft.task_live AS live WHERE live.id = input.id AND live.epoch = input.epoch),
            (SELECT attempt.agent_id FROM lineshaft.attempt WHERE attempt.task_id = input.id AND attempt.epoch = input.epoch),
            (
                SELECT ended.agent_id FROM lineshaft.task_end AS ended
                WHERE ended.id = input.id AND ended.epoch = input.epoch AND ended.status = 'COMPLETED'
            )
        ) AS agent_id
    ) AS holder
    LEFT JOIN lineshaft.cost_dispute AS known ON known.task_id = input.id AND known.epoch = input.epoch
    WHERE holder.agent_id IS NOT NULL
),
disputed AS (
    INSERT INTO lineshaft.cost_dispute AS known (at, task_id, epoch, agent_id, reported_usd, ceiling_usd)
    SELECT clock.now, claim.id, claim.epoch, claim.agent_id, claim.cost, claim.ceiling
    FROM claim CROSS JOIN clock
    WHERE claim.cost > claim.ceiling
    ORDER BY claim.id, claim.epoch
    ON CONFLICT (task_id, epoch) DO UPDATE SET reported_usd = greatest(known.reported_usd, excluded.reported_usd)
    RETURNING known.task_id, known.epoch, known.reported_usd, known.ceiling_usd, known.reported_usd - known.ceiling_usd - known.decided_usd AS usd
),
logged AS (
    -- Once, until a person has decided: a running claim may report more every second.
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
    SELECT clock.now, '{alert}', claim.id, claim.dag_id, claim.agent_id, claim.epoch, jsonb_build_object(
        'key', 'disputed_cost', 'disputed_usd', disputed.usd, 'reported_usd', disputed.reported_usd, 'ceiling_usd', disputed.ceiling_usd,
        'message', concat(
            'Task ', claim.id, ': agent ', claim.agent_id, ' reports a cost of ', trim_scale(disputed.reported_usd), ' USD for claim ', claim.epoch,
            '. Only ', trim_scale(disputed.ceiling_usd), ' USD of it count until a person decides: lineshaft costs accept, refuse or correct'
        )
    )
    FROM disputed
    JOIN claim ON claim.id = disputed.task_id AND claim.epoch = disputed.epoch
    CROSS JOIN clock
    WHERE disputed.usd > 0 AND NOT claim.is_open
)
SELECT task_id, epoch, ceiling_usd FROM disputed
