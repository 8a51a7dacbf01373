-- name: disputed_tasks
-- By cost_dispute_open.
SELECT count(DISTINCT task_id) FROM lineshaft.cost_dispute WHERE reported_usd - ceiling_usd > decided_usd

-- name: read_only
-- For the present transaction.
SELECT set_config('transaction_read_only', 'on', true), set_config('search_path', 'lineshaft,public', true)
