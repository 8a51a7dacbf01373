-- name: change_task
-- Priority, deadline and tags of a task that lock_tasks holds, and its rank. Returns the previous values.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
before AS MATERIALIZED (
    SELECT live.id, live.priority, live.deadline, task.tags,
        coalesce(%(priority)s::smallint, live.priority) AS new_priority,
        CASE WHEN %(keep_deadline)s::boolean THEN live.deadline ELSE %(deadline)s::timestamptz END AS new_deadline,
        coalesce(%(tags)s::text[], task.tags) AS new_tags
    FROM lineshaft.task_live AS live JOIN lineshaft.task ON task.id = live.id
    WHERE live.id = %(id)s::text
),
placed AS (
    UPDATE lineshaft.task_live AS live
    SET priority = before.new_priority,
        deadline = before.new_deadline,
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
    SET priority = before.new_priority, deadline = before.new_deadline, tags = before.new_tags
    FROM before
    WHERE task.id = before.id
)
SELECT priority, deadline, tags FROM before
