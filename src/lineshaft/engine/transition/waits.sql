-- Everything here follows a lock on the row of the task, so that a signal and the task that begins to wait for it see each other.

-- name: begin_wait
-- A wait that was begun before keeps its end, unless it is for something else now.
INSERT INTO lineshaft.wait AS wait (task_id, name, signal, epoch, until)
SELECT %(id)s::text, %(name)s::text, %(signal)s::text, %(epoch)s::integer,
    coalesce(%(until)s::timestamptz, clock.now + make_interval(secs => %(timeout)s::double precision))
FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
ON CONFLICT (task_id, name) DO UPDATE
SET epoch = excluded.epoch, signal = excluded.signal,
    until = CASE WHEN wait.signal IS NOT DISTINCT FROM excluded.signal THEN wait.until ELSE excluded.until END
RETURNING wait.until, extract(epoch FROM wait.until - coalesce(%(now)s::timestamptz, now()))::double precision AS left_sec

-- name: end_wait
DELETE FROM lineshaft.wait WHERE task_id = %(id)s::text AND name = %(name)s::text

-- name: receive
-- The earliest signal of this name. Its row stays, for its idempotency key.
UPDATE lineshaft.signal
SET received_at = coalesce(%(now)s::timestamptz, now()), data = NULL
FROM (
    SELECT no, data FROM lineshaft.signal
    WHERE task_id = %(id)s::text AND received_at IS NULL AND name = %(signal)s::text
    ORDER BY no LIMIT 1
) AS first
WHERE signal.task_id = %(id)s::text AND signal.no = first.no
RETURNING signal.id, signal.name, first.data, signal.at

-- name: forget_old_waits
-- A task that waits a thousand times doesn't keep a thousand attempts: every claim would read them. Those that cost something stay.
DELETE FROM lineshaft.attempt
WHERE task_id = %(id)s::text AND cost_usd = 0 AND tokens_input = 0 AND tokens_output = 0
  AND epoch = ANY (ARRAY(
    SELECT epoch FROM lineshaft.attempt
    WHERE task_id = %(id)s::text AND ended_by = 'suspend' ORDER BY epoch DESC OFFSET %(keep)s::integer
  ))

-- name: read_recipient
SELECT task.parent_id, task.created_by_token FROM lineshaft.task WHERE task.id = %(id)s::text

-- name: find_signal
SELECT id, task_id, name, at FROM lineshaft.signal WHERE task_id = %(id)s::text AND key = %(key)s::text

-- name: count_unreceived
SELECT count(*)::integer FROM lineshaft.signal WHERE task_id = %(id)s::text AND received_at IS NULL

-- name: insert_signal
INSERT INTO lineshaft.signal (id, task_id, name, key, sender, data, at)
VALUES (
    %(signal_id)s::text, %(id)s::text, %(name)s::text, %(key)s::text, %(sender)s::text, %(data)s::jsonb,
    coalesce(%(now)s::timestamptz, now())
)
RETURNING id, task_id, name, at

-- name: wake
-- PENDING → READY, if the task is in a wait for this signal. One that waits for other tasks too only loses its due time.
UPDATE lineshaft.task_live AS live
SET status = CASE WHEN live.blocked = 0 THEN 'READY' ELSE live.status END::lineshaft.task_status,
    due_at = NULL,
    ready_at = CASE WHEN live.blocked = 0 THEN coalesce(live.ready_at, clock.now) ELSE live.ready_at END,
    generation = (SELECT last_value FROM lineshaft.generation_no),
    rank = lineshaft.rank(live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now)
FROM lineshaft.wait, lineshaft.lane, (SELECT coalesce(%(now)s::timestamptz, now()) AS now) AS clock
WHERE live.id = %(id)s::text AND live.status = 'PENDING' AND live.due_at IS NOT NULL
  AND wait.task_id = live.id AND wait.epoch = live.epoch AND wait.signal = %(name)s::text
  AND lane.id = live.lane_id
RETURNING live.status::text AS status

-- name: awaited_signal
SELECT wait.signal
FROM lineshaft.task_live AS live
JOIN lineshaft.wait ON wait.task_id = live.id AND wait.epoch = live.epoch
WHERE live.id = %(id)s::text AND live.status = 'PENDING' AND live.due_at IS NOT NULL

-- name: list_signals
-- The newest.
SELECT id, name, at, received_at, sender FROM lineshaft.signal WHERE task_id = %(id)s::text ORDER BY no DESC LIMIT %(limit)s::integer

-- name: forget_waits
-- Guarded by row locks of the tasks. A task that is in a wait that is forgotten is due now.
WITH gone AS (
    DELETE FROM lineshaft.wait WHERE wait.task_id = ANY (%(ids)s::text[]) RETURNING wait.task_id, wait.epoch
)
UPDATE lineshaft.task_live AS live
SET due_at = coalesce(%(now)s::timestamptz, now())
FROM gone
WHERE live.id = gone.task_id AND live.epoch = gone.epoch AND live.status = 'PENDING' AND live.due_at IS NOT NULL
