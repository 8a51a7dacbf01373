-- Removal of lanes that no task uses. Processes cache the numbers of lanes for some minutes, and a transaction that uses one may be open
-- for hours, so a lane is deleted in three steps, each of which a later look-up undoes (submit/lanes.sql):
--   retired   no task used it at that time
--   dated     at least an hour later: no process has it cached from before, so only transactions that have an xid by now may use it
--   deleted   when they have ended, and still no task uses it
-- Lanes that others have locked are left to the next run.

-- name: plan_to_scan
-- One scan over all live tasks costs less than a look-up for each lane.
SELECT set_config('enable_seqscan', 'on', true), set_config('enable_hashjoin', 'on', true)

-- name: retire_lanes
UPDATE lineshaft.lane SET retired_at = coalesce(%(now)s::timestamptz, now())
FROM (
    SELECT id FROM lineshaft.lane
    WHERE retired_at IS NULL AND NOT EXISTS (SELECT FROM lineshaft.task_live AS live WHERE live.lane_id = lane.id)
    FOR NO KEY UPDATE SKIP LOCKED
) AS unused
WHERE lane.id = unused.id

-- name: date_lanes
-- A larger number than there are transactions is from another cluster, where the database was dumped.
UPDATE lineshaft.lane SET retired_by = pg_snapshot_xmax(pg_current_snapshot())
FROM (
    SELECT id FROM lineshaft.lane
    WHERE retired_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(after)s::double precision)
      AND (retired_by IS NULL OR retired_by > pg_snapshot_xmax(pg_current_snapshot()))
    FOR NO KEY UPDATE SKIP LOCKED
) AS unused
WHERE lane.id = unused.id

-- name: delete_lanes
-- All transactions below retired_by have ended before this snapshot, which sees their tasks. A look-up that was faster has emptied
-- retired_by, which is checked again once the row is locked; a later one waits, and then finds the lane deleted.
DELETE FROM lineshaft.lane
USING (
    SELECT id FROM lineshaft.lane
    WHERE retired_by <= pg_snapshot_xmin(pg_current_snapshot())
      AND NOT EXISTS (SELECT FROM lineshaft.task_live AS live WHERE live.lane_id = lane.id)
    FOR UPDATE SKIP LOCKED
) AS unused
WHERE lane.id = unused.id
RETURNING lane.id
