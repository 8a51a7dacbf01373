-- name: snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: plan_for_filters
-- For statements with optional filters: a custom plan leaves out unused filters and their joins. The pool's settings (generic plans, no
-- hash joins) are for the hot path. Parallel workers take as long to start as a page takes to read.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_hashjoin', 'on', true),
    set_config('max_parallel_workers_per_gather', '0', true)
