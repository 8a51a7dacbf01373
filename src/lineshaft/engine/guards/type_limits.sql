-- Limits of types on tasks that exist already.

-- name: read_type
SELECT revision, limits FROM lineshaft.task_type WHERE type = %(type)s::text

-- name: hold_type
-- The limits of a type, which can't change before the end of this transaction. Without that, who declares newer limits would skip the tasks
-- that a batch with the older ones has locked.
SELECT revision, limits FROM lineshaft.task_type WHERE type = %(type)s::text FOR SHARE

-- name: lock_waiting
-- Tasks of a type whose open limits are those of another revision, in the order of their ids, so that all batches together walk along the
-- primary key once. Tasks that others have locked are about to be claimed or changed, and parked ones wait for others: the claim looks again.
SELECT live.id, live.status = 'READY' AS is_ready, lane.required_capabilities, lane.models, lane.boost_per_minute, task.max_cost_usd, task.max_total_cost_usd, live.cost_usd, task.preset,
    coalesce(task.open_limits, CASE WHEN task.max_cost_usd IS NULL THEN 1 ELSE 0 END)::integer AS open_limits
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
JOIN lineshaft.lane ON lane.id = live.lane_id
WHERE live.id > %(after)s::text
  AND live.lane_id = ANY (ARRAY(SELECT of_type.id FROM lineshaft.lane AS of_type WHERE of_type.type = %(type)s::text))
  AND live.status IN ('PENDING', 'READY', 'RETRYING') AND live.parked IS NULL
  AND task.type_revision IS DISTINCT FROM %(revision)s::integer AND task.open_limits IS DISTINCT FROM 0
ORDER BY live.id
LIMIT %(limit)s::integer
FOR NO KEY UPDATE OF live SKIP LOCKED

-- name: lock_claimed
-- Tasks that were just claimed, while their claims hold.
SELECT live.id, false AS is_ready, lane.required_capabilities, lane.models, lane.boost_per_minute, task.max_cost_usd, task.max_total_cost_usd, live.cost_usd, task.preset,
    coalesce(task.open_limits, CASE WHEN task.max_cost_usd IS NULL THEN 1 ELSE 0 END)::integer AS open_limits
FROM lineshaft.task_live AS live
JOIN unnest(%(ids)s::text[], %(epochs)s::integer[]) AS claim (id, epoch) ON claim.id = live.id AND claim.epoch = live.epoch
JOIN lineshaft.task ON task.id = live.id
JOIN lineshaft.lane ON lane.id = live.lane_id
WHERE live.status IN ('CLAIMED', 'RUNNING')
ORDER BY live.id
FOR NO KEY UPDATE OF live

-- name: apply_limits
-- A limit that the type doesn't have is that of the preset. Bits of `open`: 1 max_cost_usd, 2 max_attempts, 4 max_duration_sec, 8 retry.
WITH before AS MATERIALIZED (
    SELECT task.id, task.max_cost_usd, task.max_attempts, task.max_duration_sec, task.retry, target.open_limits, target.lane_id,
        CASE WHEN target.open_limits & 1 > 0 THEN %(max_cost_usd)s::numeric ELSE task.max_cost_usd END AS new_cost,
        CASE WHEN target.open_limits & 2 > 0 THEN coalesce(%(max_attempts)s::smallint, target.attempts) ELSE task.max_attempts END AS new_attempts,
        CASE
            WHEN target.open_limits & 4 > 0 THEN coalesce(%(max_duration_sec)s::double precision, target.duration) ELSE task.max_duration_sec
        END AS new_duration,
        CASE WHEN target.open_limits & 8 > 0 THEN %(retry)s::jsonb ELSE task.retry END AS new_retry
    FROM unnest(
        %(ids)s::text[], %(open_limits)s::smallint[], %(lane_ids)s::integer[], %(attempts)s::smallint[], %(durations)s::double precision[]
    ) AS target (id, open_limits, lane_id, attempts, duration)
    JOIN lineshaft.task ON task.id = target.id
),
changed AS (
    UPDATE lineshaft.task
    SET max_cost_usd = before.new_cost, max_attempts = before.new_attempts, max_duration_sec = before.new_duration, retry = before.new_retry,
        open_limits = before.open_limits, type_revision = %(revision)s::integer
    FROM before
    WHERE task.id = before.id
),
placed AS (
    UPDATE lineshaft.task_live AS live
    SET max_cost_usd = before.new_cost, limit_sec = before.new_duration, lane_id = before.lane_id,
        generation = CASE WHEN live.lane_id = before.lane_id THEN live.generation ELSE (SELECT last_value FROM lineshaft.generation_no) END
    FROM before
    WHERE live.id = before.id
    RETURNING live.id, live.dag_id
)
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{task.changed}', before.id, placed.dag_id, difference || '{"because": "type_defaults"}'
FROM before
JOIN placed ON placed.id = before.id
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_object_agg(name, jsonb_build_object('from', value, 'to', new_value)), '{}') AS difference
    FROM (
        VALUES ('max_cost_usd', to_jsonb(before.max_cost_usd), to_jsonb(before.new_cost)),
            ('max_attempts', to_jsonb(before.max_attempts), to_jsonb(before.new_attempts)),
            ('max_duration_sec', to_jsonb(before.max_duration_sec), to_jsonb(before.new_duration)),
            ('retry', before.retry, before.new_retry)
    ) AS field (name, value, new_value)
    WHERE value IS DISTINCT FROM new_value
) AS differences
WHERE difference <> '{}'
ORDER BY before.id
