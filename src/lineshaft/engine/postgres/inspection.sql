-- name: disputed_tasks
-- By cost_dispute_open.
SELECT count(DISTINCT task_id) FROM lineshaft.cost_dispute WHERE reported_usd - ceiling_usd > decided_usd
