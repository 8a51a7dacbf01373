-- Each statement takes a bounded batch and skips locked rows, so that any number of nodes may run it at once.

-- name: lock_expired
-- Expired leases, by task_live_leased. The condition is checked again once the row is locked, so that a concurrent heartbeat counts.
-- without: tasks that could not be moved. silent_sec: since the last heartbeat, or the start.
SELECT live.id, live.agent_id,
    (
        SELECT instance.name FROM lineshaft.instance
        WHERE instance.agent_id = live.agent_id AND instance.incarnation = live.incarnation
    ) AS instance,
    extract(
        epoch FROM coalesce(%(now)s::timestamptz, now()) - coalesce(live.heartbeat_at, live.started_at, live.claimed_at)
    )::double precision AS silent_sec
FROM lineshaft.task_live AS live
WHERE live.lease_until < coalesce(%(now)s::timestamptz, now()) AND live.id <> ALL (%(without)s::text[])
ORDER BY live.lease_until
LIMIT %(limit)s::integer
FOR UPDATE OF live SKIP LOCKED

-- name: promote_due
-- Back-offs, snoozes and schedules that are due, by task_live_due. A task that is still blocked only loses its due time; the caller
-- completes a batch whose children are all done. `only`: just this task.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
due AS MATERIALIZED (
    SELECT live.id
    FROM lineshaft.task_live AS live, clock
    WHERE live.status IN ('PENDING', 'RETRYING') AND live.due_at IS NOT NULL AND live.due_at <= clock.now
      AND live.id <> ALL (%(without)s::text[])
      AND (%(only)s::text IS NULL OR live.id = %(only)s::text)
    ORDER BY live.due_at
    LIMIT %(limit)s::integer
    FOR UPDATE OF live SKIP LOCKED
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET status = CASE WHEN live.blocked = 0 AND NOT live.is_batch THEN 'READY' ELSE live.status END::lineshaft.task_status,
        due_at = CASE WHEN live.is_batch AND live.blocked = 0 THEN live.due_at END,
        ready_at = CASE WHEN live.blocked = 0 THEN coalesce(live.ready_at, clock.now) ELSE live.ready_at END,
        rank = lineshaft.rank(
            live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
        ),
        generation = (SELECT last_value FROM lineshaft.generation_no)
    FROM due, lineshaft.lane, clock
    WHERE live.id = due.id AND lane.id = live.lane_id
    RETURNING live.id, live.dag_id, live.lane_id, live.status, live.is_batch
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id)
    SELECT clock.now, '{task.ready}', moved.id, moved.dag_id FROM moved CROSS JOIN clock WHERE moved.status = 'READY'
),
woken AS (
    SELECT
    -- include: notify_lanes
    FROM moved WHERE status = 'READY' HAVING count(*) > 0
)
SELECT moved.id, moved.status::text AS status, moved.is_batch, (SELECT count(*) FROM woken) AS notified FROM moved

-- name: expired_tasks
-- Tasks that missed their deadline and are cancelled for it, by task_live_rekey.
SELECT id
FROM lineshaft.task_live
WHERE rekey_at IS NOT NULL AND rekey_at <= coalesce(%(now)s::timestamptz, now())
  AND lineshaft.is_expired_1(expires, deadline, coalesce(%(now)s::timestamptz, now()))
ORDER BY rekey_at
LIMIT %(limit)s::integer

-- name: rekey_deadlines
-- Deadline boosts that have grown by half a point, by task_live_rekey; the last step is the deadline itself.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
due AS MATERIALIZED (
    SELECT live.id
    FROM lineshaft.task_live AS live, clock
    WHERE live.rekey_at IS NOT NULL AND live.rekey_at <= clock.now
      -- Those are cancelled.
      AND NOT lineshaft.is_expired_1(live.expires, live.deadline, clock.now)
    ORDER BY live.rekey_at
    LIMIT %(limit)s::integer
    FOR UPDATE OF live SKIP LOCKED
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET rank = lineshaft.rank(
            live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
        ),
        rekey_at = lineshaft.rekey_at(live.deadline, clock.now),
        parked_key = CASE WHEN live.parked = 'fair' THEN NULL ELSE live.parked_key END
    FROM due, lineshaft.lane, clock
    WHERE live.id = due.id AND lane.id = live.lane_id
    RETURNING live.id, live.dag_id, live.agent_id, live.deadline
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, data)
    SELECT clock.now, '{task.deadline_missed}', moved.id, moved.dag_id, moved.agent_id, jsonb_build_object('deadline', lineshaft.iso(moved.deadline))
    FROM moved CROSS JOIN clock WHERE moved.deadline <= clock.now
)
SELECT moved.id, moved.deadline <= clock.now AS missed FROM moved CROSS JOIN clock

-- name: expire_locks
-- A batch keeps its lock while it is live.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
gone AS MATERIALIZED (
    SELECT freed.*
    FROM clock
    CROSS JOIN LATERAL (
        SELECT array_agg(held.key) AS keys, array_agg(held.holder_task_id) AS holders
        FROM (
            SELECT key, holder_task_id FROM lineshaft.lock WHERE lock.expires_at < clock.now
            UNION ALL
            SELECT key, holder_task_id FROM lineshaft.lock_share AS share WHERE share.expires_at < clock.now
        ) AS held
        WHERE coalesce((SELECT NOT is_batch FROM lineshaft.task_live WHERE task_live.id = held.holder_task_id), true)
        HAVING count(*) > 0
    ) AS expired
    CROSS JOIN LATERAL lineshaft.release_locks_1(expired.keys, expired.holders, NULL, clock.now) AS freed
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, data)
    SELECT clock.now, '{lock.expired}', gone.holder_task_id, gone.agent_id, jsonb_build_object('key', gone.key) FROM gone CROSS JOIN clock
)
SELECT key FROM gone

-- name: free_locks_with_parked
-- Keys of locks that are free, or that readers can join, with parked tasks, which should have been unparked. One index look-up per key.
WITH RECURSIVE wanted AS (
    (SELECT lock_key FROM lineshaft.task_live WHERE status = 'READY' AND lock_key IS NOT NULL ORDER BY lock_key LIMIT 1)
    UNION ALL
    SELECT next.lock_key
    FROM wanted
    CROSS JOIN LATERAL (
        SELECT live.lock_key FROM lineshaft.task_live AS live
        WHERE live.status = 'READY' AND live.lock_key > wanted.lock_key
        ORDER BY live.lock_key LIMIT 1
    ) AS next
)
SELECT wanted.lock_key
FROM wanted
WHERE NOT
  -- include: lock_closed
  AND (
    SELECT true FROM lineshaft.task_live AS live
    WHERE live.status = 'READY' AND live.lock_key = wanted.lock_key AND live.parked = 'lock'
    LIMIT 1
  )
LIMIT %(limit)s::integer

-- name: dags_with_parked
-- DAGs with a parked task that the budget allows now.
WITH RECURSIVE waiting AS (
    (SELECT dag_id FROM lineshaft.task_live WHERE parked = 'dag_budget' ORDER BY dag_id LIMIT 1)
    UNION ALL
    SELECT next.dag_id
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT live.dag_id FROM lineshaft.task_live AS live
        WHERE live.parked = 'dag_budget' AND live.dag_id > waiting.dag_id
        ORDER BY live.dag_id LIMIT 1
    ) AS next
)
SELECT waiting.dag_id
FROM waiting
WHERE EXISTS (
    SELECT
    FROM lineshaft.dag
    CROSS JOIN LATERAL (
        SELECT lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd
        FROM lineshaft.task_live WHERE parked = 'dag_budget' AND task_live.dag_id = dag.id OFFSET 0
    ) AS live
    CROSS JOIN lineshaft.limits
    WHERE dag.id = waiting.dag_id
      AND lineshaft.affords_1(
        dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd, live.limit_usd, limits.default_max_cost_usd
      )
)
LIMIT %(limit)s::integer

-- name: try_turn
-- One process at a time changes generations; the others don't wait.
SELECT pg_try_advisory_xact_lock(hashtextextended('lineshaft.generation', 0))

-- name: remaining
-- Claimable tasks of the current generation, up to a limit.
SELECT count(*)
FROM (
    SELECT FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = (SELECT last_value FROM lineshaft.generation_no)
    LIMIT %(limit)s::integer
) AS counted

-- name: announce_generation
-- Claims read the next generation once this is committed; tasks go there only once it is opened. In the reverse order a task could be
-- notified but not found. date_generation records which transactions may still write into the previous one; until then, any.
INSERT INTO lineshaft.generation (no, opened_by)
SELECT last_value + 1, '9223372036854775807' FROM lineshaft.generation_no
ON CONFLICT (no) DO NOTHING

-- name: open_generation
-- In a later transaction. Not nextval, which skips numbers in a crash; see the sequence.
SELECT setval('lineshaft.generation_no', last_value + 1)
FROM lineshaft.generation_no
WHERE EXISTS (SELECT FROM lineshaft.generation WHERE no = last_value + 1)

-- name: date_generation
-- After open_generation, with a newer snapshot: transactions whose xid is not in it read the new number.
UPDATE lineshaft.generation
SET opened_by = pg_snapshot_xmax(pg_current_snapshot())
WHERE no <= (SELECT last_value FROM lineshaft.generation_no) AND opened_by = '9223372036854775807'

-- name: repair_generation
-- The sequence must not be ahead of the table: tasks would become READY in a generation that no claim reads.
INSERT INTO lineshaft.generation (no)
SELECT last_value FROM lineshaft.generation_no WHERE last_value NOT IN (SELECT no FROM lineshaft.generation)

-- name: move_stragglers
-- Moves tasks of older generations to the current one, so that those can be closed. Only open ones: closed ones may have millions of dead
-- index entries while an old transaction prevents vacuum. Sends notifications again, because claims skip the rows that are locked here.
WITH moved AS (
    UPDATE lineshaft.task_live AS live
    SET generation = (SELECT last_value FROM lineshaft.generation_no)
    FROM (
        SELECT remaining.id
        FROM lineshaft.generation AS older
        CROSS JOIN LATERAL (
            SELECT id FROM lineshaft.task_live
            WHERE status = 'READY' AND parked IS NULL AND generation = older.no
            LIMIT %(limit)s::integer
            FOR UPDATE SKIP LOCKED
        ) AS remaining
        WHERE older.no < (SELECT last_value FROM lineshaft.generation_no)
        LIMIT %(limit)s::integer
    ) AS left_behind
    WHERE live.id = left_behind.id
    RETURNING live.lane_id
)
SELECT
-- include: notify_lanes
FROM moved HAVING count(*) > 0

-- name: close_generations
-- Drained generations, once no transaction is left that could have read their number before the next one was opened: it might still
-- write into them. (Writers get their xid before they read the number: submission.sql.) Old readers don't prevent this.
DELETE FROM lineshaft.generation
WHERE no < (SELECT last_value FROM lineshaft.generation_no)
  AND (
    SELECT true FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND task_live.generation = generation.no
    LIMIT 1
  ) IS NULL
  AND pg_snapshot_xmin(pg_current_snapshot()) >= (
    SELECT next.opened_by FROM lineshaft.generation AS next WHERE next.no > generation.no ORDER BY next.no LIMIT 1
  )
RETURNING no

-- name: count_generations
SELECT count(*) FROM lineshaft.generation

-- name: sweep_generations
-- READY tasks in closed generations, which no claim would find. There should be none. Checks the `last` closed ones, for the reason given
-- at move_stragglers; NULL: all.
WITH moved AS (
    UPDATE lineshaft.task_live AS live
    SET generation = (SELECT last_value FROM lineshaft.generation_no)
    FROM (
        SELECT id FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation < (SELECT min(no) FROM lineshaft.generation)
          AND generation >= coalesce((SELECT min(no) FROM lineshaft.generation) - %(last)s::integer, 0)
        LIMIT %(limit)s::integer
        FOR UPDATE SKIP LOCKED
    ) AS lost
    WHERE live.id = lost.id
    RETURNING live.lane_id
)
SELECT
-- include: notify_lanes
FROM moved HAVING count(*) > 0

-- name: try_lead
-- For duties that one node performs: leadership lasts until the end of the transaction.
SELECT pg_try_advisory_xact_lock(hashtextextended(%(duty)s::text, 0))

-- name: delete_finished
-- Retention of old COMPLETED and CANCELLED tasks, unless a live task depends on them, or a task that may be revived: a dead letter that
-- is retried needs its inputs. A task that was ever a dead letter is never deleted, nor is one with a cost that a person has to decide on.
WITH old AS MATERIALIZED (
    SELECT ended.id
    FROM lineshaft.task_end AS ended
    WHERE ended.ended_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
      AND ended.status IN ('COMPLETED', 'CANCELLED')
      AND NOT EXISTS (
        SELECT FROM lineshaft.task
        JOIN lineshaft.dag ON dag.id = task.dag_id
        WHERE task.id = ended.id AND dag.status IN ('pending', 'running', 'failed')
      )
      AND NOT EXISTS (
        SELECT FROM lineshaft.edge JOIN lineshaft.task_live AS live ON live.id = edge.task_id WHERE edge.depends_on = ended.id
      )
      AND NOT EXISTS (
        SELECT FROM lineshaft.edge JOIN lineshaft.task_end AS undone ON undone.id = edge.task_id
        WHERE edge.depends_on = ended.id AND undone.status <> 'COMPLETED'
          AND (
            undone.ended_at >= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(older_than)s::double precision)
            OR EXISTS (SELECT FROM lineshaft.dead_letter AS dead WHERE dead.task_id = undone.id)
          )
      )
      AND NOT EXISTS (SELECT FROM lineshaft.dead_letter AS dead WHERE dead.task_id = ended.id)
      AND NOT EXISTS (
        SELECT FROM lineshaft.cost_dispute AS dispute
        WHERE dispute.task_id = ended.id AND dispute.reported_usd - dispute.ceiling_usd > dispute.decided_usd
      )
    ORDER BY ended.ended_at
    LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
),
ends AS (DELETE FROM lineshaft.task_end USING old WHERE task_end.id = old.id),
keys AS (DELETE FROM lineshaft.task_key USING lineshaft.task, old WHERE task.id = old.id AND task_key.key = task.idempotency_key AND task_key.task_id = old.id),
edges AS (DELETE FROM lineshaft.edge USING old WHERE edge.task_id = old.id),
attempts AS (DELETE FROM lineshaft.attempt USING old WHERE attempt.task_id = old.id),
disputes AS (DELETE FROM lineshaft.cost_dispute USING old WHERE cost_dispute.task_id = old.id),
corrections AS (DELETE FROM lineshaft.cost_correction USING old WHERE cost_correction.task_id = old.id),
steps AS (DELETE FROM lineshaft.step USING old WHERE step.task_id = old.id),
checkpoints AS (DELETE FROM lineshaft.checkpoint USING old WHERE checkpoint.task_id = old.id),
waits AS (DELETE FROM lineshaft.wait USING old WHERE wait.task_id = old.id),
signals AS (DELETE FROM lineshaft.signal USING old WHERE signal.task_id = old.id),
artifact_refs AS (DELETE FROM lineshaft.artifact_ref USING old WHERE artifact_ref.task_id = old.id),
tasks AS (DELETE FROM lineshaft.task USING old WHERE task.id = old.id RETURNING task.dag_id),
dags AS (
    DELETE FROM lineshaft.dag
    WHERE dag.id IN (SELECT dag_id FROM tasks)
      -- All remaining tasks of the DAG are deleted here.
      AND NOT EXISTS (SELECT FROM lineshaft.task WHERE task.dag_id = dag.id AND task.id NOT IN (SELECT id FROM old))
    RETURNING dag.id, dag.idempotency_key
),
dag_keys AS (DELETE FROM lineshaft.dag_key USING dags WHERE dag_key.key = dags.idempotency_key AND dag_key.dag_id = dags.id)
SELECT count(*) FROM old
