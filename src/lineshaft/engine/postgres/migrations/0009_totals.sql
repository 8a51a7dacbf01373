-- The limit over all attempts of a task binds each of them: a claim reserves no more than what is left of it, and a completion that has cost
-- more is refused.

-- In task_live, because claims and completions read nothing else. NULL in tasks of processes of the previous version.
ALTER TABLE lineshaft.task_live ADD COLUMN max_total_cost_usd numeric(20, 6);
COMMENT ON COLUMN lineshaft.task_live.max_total_cost_usd IS 'The most that all attempts together may cost; NULL: no limit.';

UPDATE lineshaft.task_live AS live
SET max_total_cost_usd = task.max_total_cost_usd
FROM lineshaft.task
WHERE task.id = live.id AND task.max_total_cost_usd IS NOT NULL;

-- What an attempt may cost: the limit of one, or what earlier ones have left of the limit of all. NULL: no limit. Negative: they have cost more.
CREATE FUNCTION lineshaft.attempt_limit_1(max_cost_usd numeric, max_total_cost_usd numeric, cost_usd numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(max_cost_usd, max_total_cost_usd - cost_usd);

-- What a claim reserves for an attempt with this limit: all of it, or without one the installation's default, which limits nothing.
CREATE FUNCTION lineshaft.reservation_2(attempt_limit_usd numeric, default_max_cost_usd numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(coalesce(attempt_limit_usd, default_max_cost_usd, 0), 0);
