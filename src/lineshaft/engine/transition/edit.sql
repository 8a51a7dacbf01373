-- name: change_task
-- A live task that lock_tasks holds, with its rank and its lane, or a dead letter that lock_ended holds. Limits that are set here are no longer
-- those of the type. Returns the previous values.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
before AS MATERIALIZED (
    SELECT task.id, coalesce(live.priority, task.priority) AS priority, task.deadline, task.tags, task.max_cost_usd, task.max_total_cost_usd,
        task.max_attempts, task.max_duration_sec,
        coalesce(%(priority)s::smallint, live.priority, task.priority) AS new_priority,
        CASE WHEN 'deadline' = ANY (%(keep)s::text[]) THEN task.deadline ELSE %(deadline)s::timestamptz END AS new_deadline,
        coalesce(%(tags)s::text[], task.tags) AS new_tags,
        CASE WHEN 'max_cost_usd' = ANY (%(keep)s::text[]) THEN task.max_cost_usd ELSE %(max_cost_usd)s::numeric END AS new_cost,
        CASE
            WHEN 'max_total_cost_usd' = ANY (%(keep)s::text[]) THEN task.max_total_cost_usd ELSE %(max_total_cost_usd)s::numeric
        END AS new_total_cost,
        coalesce(%(max_attempts)s::smallint, task.max_attempts) AS new_attempts,
        coalesce(%(max_duration_sec)s::double precision, task.max_duration_sec) AS new_duration
    FROM lineshaft.task LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
    WHERE task.id = %(id)s::text
),
placed AS (
    UPDATE lineshaft.task_live AS live
    SET priority = before.new_priority,
        deadline = before.new_deadline,
        limit_sec = before.new_duration,
        max_cost_usd = before.new_cost,
        max_total_cost_usd = before.new_total_cost,
        lane_id = coalesce(%(lane_id)s::integer, live.lane_id),
        -- It may be the first of its fair_key now.
        parked_key = CASE WHEN live.parked = 'fair' THEN NULL ELSE live.parked_key END,
        generation = CASE WHEN %(lane_id)s::integer IS NULL THEN live.generation ELSE (SELECT last_value FROM lineshaft.generation_no) END,
        rank = lineshaft.rank(
            before.new_priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), before.new_deadline, clock.now
        ),
        -- rekey_deadlines logs a deadline that has passed already; unless it did before, and the deadline is the same.
        rekey_at = coalesce(
            lineshaft.rekey_at(before.new_deadline, clock.now),
            CASE WHEN before.new_deadline IS DISTINCT FROM before.deadline THEN before.new_deadline ELSE live.rekey_at END
        )
    FROM before, lineshaft.lane, clock
    WHERE live.id = before.id AND lane.id = live.lane_id
),
changed AS (
    UPDATE lineshaft.task
    SET priority = before.new_priority, deadline = before.new_deadline, tags = before.new_tags, max_cost_usd = before.new_cost,
        max_total_cost_usd = before.new_total_cost, max_attempts = before.new_attempts, max_duration_sec = before.new_duration,
        open_limits = task.open_limits & ~%(fixed_limits)s::smallint
    FROM before
    WHERE task.id = before.id
)
SELECT priority, deadline, tags, max_cost_usd, max_total_cost_usd, max_attempts, max_duration_sec FROM before

-- name: lock_ended
-- Against a revival, which reads the limits, and other decisions.
SELECT ended.status::text AS status, ended.epoch,
    (SELECT task.expire_at_deadline FROM lineshaft.task WHERE task.id = ended.id) AS expires,
    (SELECT dag.id FROM lineshaft.dag JOIN lineshaft.task ON task.dag_id = dag.id WHERE task.id = ended.id) AS dag_id
FROM lineshaft.task_end AS ended
WHERE ended.id = %(id)s::text
FOR UPDATE OF ended
