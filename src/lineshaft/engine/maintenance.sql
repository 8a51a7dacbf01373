-- What keeps the queue going without anybody asking: expired leases, due retries, deadlines, generations, retention. Used by
-- store/upkeep.py. Each statement takes a bounded batch and skips what others hold, so that any number of nodes may run it at once.

-- name: lock_expired
-- Leases that have run out, through task_live_leased. A heartbeat that was quicker is seen: the condition is checked again once
-- the row is locked. `without`: tasks that could not be moved.
SELECT id
FROM lineshaft.task_live
WHERE lease_until < coalesce(%(now)s::timestamptz, now()) AND id <> ALL (%(without)s::text[])
ORDER BY lease_until
LIMIT %(limit)s::integer
FOR UPDATE SKIP LOCKED

-- name: promote_due
-- Back-offs, snoozes and schedules whose time has come, through task_live_due. One that still waits for a dependency only forgets its
-- time; a batch whose children are all done is told to whoever called.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
due AS MATERIALIZED (
    SELECT live.id
    FROM lineshaft.task_live AS live, clock
    WHERE live.status IN ('PENDING', 'RETRYING') AND live.due_at IS NOT NULL AND live.due_at <= clock.now
      AND live.id <> ALL (%(without)s::text[])
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
    SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END) FROM moved WHERE status = 'READY' HAVING count(*) > 0
)
SELECT moved.id, moved.status::text, moved.is_batch, (SELECT count(*) FROM woken) FROM moved

-- name: rekey_deadlines
-- Deadline boosts that have moved by half a point, through task_live_rekey; the last step is the deadline itself.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
due AS MATERIALIZED (
    SELECT live.id
    FROM lineshaft.task_live AS live, clock
    WHERE live.rekey_at IS NOT NULL AND live.rekey_at <= clock.now
    ORDER BY live.rekey_at
    LIMIT %(limit)s::integer
    FOR UPDATE OF live SKIP LOCKED
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET rank = lineshaft.rank(
            live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, clock.now), live.deadline, clock.now
        ),
        rekey_at = lineshaft.rekey_at(live.deadline, clock.now)
    FROM due, lineshaft.lane, clock
    WHERE live.id = due.id AND lane.id = live.lane_id
    RETURNING live.id, live.dag_id, live.agent_id, live.deadline
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, data)
    SELECT clock.now, '{task.deadline_missed}', moved.id, moved.dag_id, moved.agent_id, jsonb_build_object('deadline', moved.deadline)
    FROM moved CROSS JOIN clock WHERE moved.deadline <= clock.now
)
SELECT moved.id, moved.deadline <= clock.now AS missed FROM moved CROSS JOIN clock

-- name: expire_locks
-- Locks whose holder let them run out. A batch keeps its own while it has children to run.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
),
gone AS (
    DELETE FROM lineshaft.lock
    USING clock
    WHERE lock.expires_at < clock.now
      AND coalesce((SELECT NOT is_batch FROM lineshaft.task_live WHERE task_live.id = lock.holder_task_id), true)
    RETURNING lock.key, lock.holder_task_id, lock.agent_id
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, agent_id, data)
    SELECT clock.now, '{lock.expired}', gone.holder_task_id, gone.agent_id, jsonb_build_object('key', gone.key) FROM gone CROSS JOIN clock
)
SELECT key FROM gone

-- name: parked_for_nothing
-- Lock keys that tasks are parked for though nobody holds them: what a release should have brought back. One index look-up a key.
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
WHERE NOT EXISTS (SELECT FROM lineshaft.lock WHERE lock.key = wanted.lock_key)
  AND (
    SELECT true FROM lineshaft.task_live AS live
    WHERE live.status = 'READY' AND live.lock_key = wanted.lock_key AND live.parked = 'lock'
    LIMIT 1
  )
LIMIT %(limit)s::integer

-- name: dags_with_parked
-- With a parked task that could be paid by now: those that can't must not hide others.
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
        SELECT lane_id FROM lineshaft.task_live WHERE parked = 'dag_budget' AND task_live.dag_id = dag.id OFFSET 0
    ) AS live
    JOIN lineshaft.lane ON lane.id = live.lane_id
    WHERE dag.id = waiting.dag_id
      AND (dag.budget_ceiling_usd IS NULL OR dag.spent_usd + dag.reserved_usd + coalesce(lane.max_cost_usd, 0) <= dag.budget_ceiling_usd)
)
LIMIT %(limit)s::integer

-- name: try_turn
-- One process at a time turns generations; whoever doesn't get the lock leaves it to the other.
SELECT pg_try_advisory_xact_lock(hashtextextended('lineshaft.generation', 0))

-- name: remaining
-- How many claimable tasks the current generation still has, counted no further than the number that have left it.
SELECT count(*)
FROM (
    SELECT FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = (SELECT last_value FROM lineshaft.generation_no)
    LIMIT %(limit)s::integer
) AS counted

-- name: announce_generation
-- Claims look into the next generation from when this is committed; tasks go there only once it is opened. The other way round a task
-- could be told and not found. Who may still write into the one before is known when it is dated; until then, anybody.
INSERT INTO lineshaft.generation (no, opened_by)
SELECT last_value + 1, '9223372036854775807' FROM lineshaft.generation_no
ON CONFLICT (no) DO NOTHING

-- name: open_generation
-- In a transaction after that. Not nextval, which jumps with a crash of the server; see the sequence.
SELECT setval('lineshaft.generation_no', last_value + 1)
FROM lineshaft.generation_no
WHERE EXISTS (SELECT FROM lineshaft.generation WHERE no = last_value + 1)

-- name: date_generation
-- After the statement that opened it, so that this one's snapshot is younger: whoever has an xid that isn't in it reads the new number.
UPDATE lineshaft.generation
SET opened_by = pg_snapshot_xmax(pg_current_snapshot())
WHERE no <= (SELECT last_value FROM lineshaft.generation_no) AND opened_by = '9223372036854775807'

-- name: mend_generation
-- The sequence should never be ahead of the table; tasks would become READY in a generation that no claim looks into.
INSERT INTO lineshaft.generation (no)
SELECT last_value FROM lineshaft.generation_no WHERE last_value NOT IN (SELECT no FROM lineshaft.generation)

-- name: move_stragglers
-- What remains in older generations goes along, so that they can be closed. Only in those that are open: the dead entries of all others,
-- which may be millions while an old transaction holds up cleaning, would be read again by every turn. They are told once more: claims
-- pass over what is locked here.
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
SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END)
FROM moved HAVING count(*) > 0

-- name: close_generations
-- Drained generations, once no transaction is left that could have read their number before the next one was opened: it might still
-- write into them. (Whoever writes reads the number after it has got its xid: submission.sql.) Readers, however old, don't hold this up.
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
-- READY tasks in a generation that is closed: nobody would look at them. There should be none. Looked for in the last ones that were
-- closed, for the reason given at move_stragglers; NULL: in all.
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
SELECT pg_notify('lineshaft', CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END)
FROM moved HAVING count(*) > 0

-- name: try_lead
-- For duties of which one in the whole fleet is enough: leadership lasts as long as the transaction.
SELECT pg_try_advisory_xact_lock(hashtextextended(%(duty)s::text, 0))

-- name: delete_finished
-- Retention: tasks that ended well, or were cancelled, long ago, and that nothing still refers to which is alive, or is kept and may come
-- back: a dead letter that is retried wants its inputs. What ever was a dead letter is never deleted by itself, whatever was decided
-- about it (R-131).
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
            OR EXISTS (SELECT FROM lineshaft.dead_letter AS letter WHERE letter.task_id = undone.id)
          )
      )
      AND NOT EXISTS (SELECT FROM lineshaft.dead_letter AS letter WHERE letter.task_id = ended.id)
    ORDER BY ended.ended_at
    LIMIT %(limit)s::integer
    FOR UPDATE SKIP LOCKED
),
ends AS (DELETE FROM lineshaft.task_end USING old WHERE task_end.id = old.id),
keys AS (DELETE FROM lineshaft.task_key USING lineshaft.task, old WHERE task.id = old.id AND task_key.key = task.idempotency_key AND task_key.task_id = old.id),
edges AS (DELETE FROM lineshaft.edge USING old WHERE edge.task_id = old.id),
attempts AS (DELETE FROM lineshaft.attempt USING old WHERE attempt.task_id = old.id),
steps AS (DELETE FROM lineshaft.step USING old WHERE step.task_id = old.id),
checkpoints AS (DELETE FROM lineshaft.checkpoint USING old WHERE checkpoint.task_id = old.id),
tasks AS (DELETE FROM lineshaft.task USING old WHERE task.id = old.id RETURNING task.dag_id),
dags AS (
    DELETE FROM lineshaft.dag
    WHERE dag.id IN (SELECT dag_id FROM tasks)
      -- The last of its tasks are among these.
      AND NOT EXISTS (SELECT FROM lineshaft.task WHERE task.dag_id = dag.id AND task.id NOT IN (SELECT id FROM old))
    RETURNING dag.id, dag.idempotency_key
),
dag_keys AS (DELETE FROM lineshaft.dag_key USING dags WHERE dag_key.key = dags.idempotency_key AND dag_key.dag_id = dags.id)
SELECT count(*) FROM old
