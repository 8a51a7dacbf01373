-- Expressions that several statements contain. A statement includes one with a line `-- include: NAME`.

-- fragment: notify_lanes
-- Wakes processes that wait for work of these lanes: aggregates the column `lane_id`. A notification is at most 8,000 bytes long.
pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END)

-- fragment: settle_agent
-- The columns of `lineshaft.agent` that change when claims end: `share` has n, reserved, actual (money) and today (a date).
held = held - share.n, reserved_usd = agent.reserved_usd - share.reserved, spent_usd = spent_usd + share.actual,
spent_on_day_usd = CASE WHEN spend_day >= share.today THEN spent_on_day_usd ELSE 0 END + share.actual,
spend_day = greatest(spend_day, share.today)

-- fragment: slowdown_until
-- The end of the longest slowdown of the models in the column `models_available`; `clock` has now.
(
    SELECT max(slowdown.until)
    FROM lineshaft.slowdown
    WHERE slowdown.until > (SELECT now FROM clock)
      AND (slowdown.key = '*' OR EXISTS (
        SELECT FROM unnest(models_available) AS own (model)
        WHERE slowdown.key IN ('model:' || own.model, 'provider:' || split_part(own.model, '/', 1))
      ))
)
