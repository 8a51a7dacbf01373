-- What a run of a gate that costs money reserves.
ALTER TABLE lineshaft.limits ADD COLUMN judge_max_cost_usd numeric(20, 6) NOT NULL DEFAULT 0.05;
COMMENT ON COLUMN lineshaft.limits.judge_max_cost_usd IS 'What a run of a gate that costs money reserves.';
