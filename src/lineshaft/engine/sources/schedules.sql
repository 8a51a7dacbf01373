-- name: lock_due
-- One schedule whose time has come, by source_due. Those that another server works on are skipped.
SELECT id, created_at, next_tick, paused, name, kind, definition, coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.source
WHERE next_at IS NOT NULL AND next_at <= coalesce(%(now)s::timestamptz, now())
ORDER BY next_at
LIMIT 1
FOR NO KEY UPDATE SKIP LOCKED

-- name: move
UPDATE lineshaft.source SET next_tick = %(next_tick)s::timestamptz, next_at = %(next_at)s::timestamptz WHERE id = %(id)s::bigint

-- name: next_due
-- Seconds until a schedule is due, by source_due; NULL: there is none.
SELECT extract(epoch FROM min(next_at) - coalesce(%(now)s::timestamptz, now()))::double precision AS seconds
FROM lineshaft.source WHERE next_at IS NOT NULL
