-- Tasks that become one child for each item of a list. Processes of the previous version don't make the children: a task that one of them
-- unblocks completes with an empty list. Use for_each once all processes have this version.

ALTER TABLE lineshaft.task ADD COLUMN for_each jsonb;
COMMENT ON COLUMN lineshaft.task.for_each IS 'The list for whose items it has children, with max and concurrency; null: none.';
