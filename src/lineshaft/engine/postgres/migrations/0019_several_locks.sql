-- Several document locks for one task, taken together or not at all, and locks that readers share. Processes of the previous version neither take
-- nor keep them: they hold once all processes have this version.

-- While readers have a lock, its row in `lock` belongs to none of them: its holder is `shared:` and the task that was the first, and it doesn't
-- expire. Every claim and every release of a lock of any kind locks that row first.
CREATE TABLE lineshaft.lock_share (
    token bigint NOT NULL,
    acquired_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    key text COLLATE "C" NOT NULL,
    holder_task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    CONSTRAINT lock_share_pkey PRIMARY KEY (key, holder_task_id)
);
CREATE INDEX lock_share_token ON lineshaft.lock_share (token);
CREATE INDEX lock_share_expires_at ON lineshaft.lock_share (expires_at);
COMMENT ON TABLE lineshaft.lock_share IS 'Readers of document locks that are shared.';
COMMENT ON COLUMN lineshaft.lock_share.token IS 'The fencing number of the claim: the same for all its locks.';
COMMENT ON COLUMN lineshaft.lock_share.acquired_at IS 'Since when it is held.';
COMMENT ON COLUMN lineshaft.lock_share.expires_at IS 'When it ends unless it is renewed.';
COMMENT ON COLUMN lineshaft.lock_share.key IS 'The key of the lock.';
COMMENT ON COLUMN lineshaft.lock_share.holder_task_id IS 'The task, or the batch whose children share it.';
COMMENT ON COLUMN lineshaft.lock_share.agent_id IS 'The agent that works on the task.';

COMMENT ON COLUMN lineshaft.lock.holder_task_id IS 'The task, or the batch whose children share it; shared: and a task while readers have it (lock_share); outside: and a name.';
COMMENT ON COLUMN lineshaft.task_live.lock_key IS 'The document lock that it needs; of several the one that it waits for, or the first.';
COMMENT ON COLUMN lineshaft.task_live.lock_owner IS 'The batch that holds the lock for it; NULL: itself. Of several: a batch that holds some of them.';

-- Tasks that wait to have a lock alone: they keep readers out.
CREATE INDEX task_live_waiting_writer ON lineshaft.task_live (lock_key)
    WHERE parked = 'lock' AND (admission -> 'locks' ->> lock_key) IS DISTINCT FROM 'true';

CREATE FUNCTION lineshaft.lock_keys_1(p_lock_key text, p_admission jsonb) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN p_admission ? 'locks' THEN ARRAY(SELECT key COLLATE "C" FROM jsonb_object_keys(p_admission -> 'locks') AS key ORDER BY 1)
        WHEN p_lock_key IS NULL THEN '{}'
        ELSE ARRAY[p_lock_key]
    END
$$;
COMMENT ON FUNCTION lineshaft.lock_keys_1(text, jsonb) IS 'The document locks that a task needs, in order.';

CREATE FUNCTION lineshaft.first_lock_1(p_lock_key text, p_admission jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_admission IS NULL THEN p_lock_key ELSE (lineshaft.lock_keys_1(p_lock_key, p_admission))[1] END
$$;
COMMENT ON FUNCTION lineshaft.first_lock_1(text, jsonb) IS 'The document lock that a new task has in task_live.';

-- A batch holds what it shares with its tasks for all of them, the outermost one that is live, and in its own way.
CREATE FUNCTION lineshaft.locks_of_1(
    p_task text, p_owner text, p_lock_key text, p_locks jsonb, OUT key text, OUT holder text, OUT is_shared boolean
) RETURNS SETOF record LANGUAGE sql STABLE AS $$
    SELECT p_lock_key, coalesce(p_owner, p_task), false WHERE p_locks IS NULL AND p_lock_key IS NOT NULL
    UNION ALL
    SELECT needed.key, coalesce(batch.id, p_task), coalesce(batch.is_shared, needed.value::boolean)
    FROM jsonb_each_text(p_locks) AS needed
    LEFT JOIN LATERAL (
        WITH RECURSIVE around AS (
            SELECT outer_task.id, outer_task.parent_id, outer_task.lock_key, outer_task.admission, 1 AS distance
            FROM lineshaft.task
            JOIN lineshaft.task AS outer_task ON outer_task.id = task.parent_id AND outer_task.is_batch
            WHERE task.id = p_task AND p_owner IS NOT NULL
            UNION ALL
            SELECT outer_task.id, outer_task.parent_id, outer_task.lock_key, outer_task.admission, around.distance + 1
            FROM around
            JOIN lineshaft.task AS outer_task ON outer_task.id = around.parent_id AND outer_task.is_batch
        )
        SELECT around.id, coalesce((around.admission -> 'locks' ->> needed.key)::boolean, false) AS is_shared
        FROM around
        WHERE needed.key = ANY (lineshaft.lock_keys_1(around.lock_key, around.admission))
          AND EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = around.id)
        ORDER BY around.distance DESC
        LIMIT 1
    ) AS batch ON true
$$;
COMMENT ON FUNCTION lineshaft.locks_of_1(text, text, text, jsonb) IS 'The document locks that a task needs: who holds each for it, and how.';

-- The rule of claims, except for the task with one lock that it has alone: of those, lock_granted in claims.sql has it. `p_writers`: keys for which
-- other tasks of the claim are about to wait.
CREATE FUNCTION lineshaft.refused_lock_1(
    p_task text, p_owner text, p_lock_key text, p_locks jsonb, p_now timestamptz, p_writers text[] DEFAULT '{}'
) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT needed.key
    FROM lineshaft.locks_of_1(p_task, p_owner, p_lock_key, p_locks) AS needed
    JOIN lineshaft.lock ON lock.key = needed.key
    WHERE CASE
        -- Free: the claim itself has just made the row.
        WHEN lock.holder_task_id = '' THEN false
        WHEN NOT lock.holder_task_id LIKE 'shared:%' THEN
            lock.holder_task_id <> needed.holder
            AND (
                lock.expires_at >= p_now
                OR EXISTS (SELECT FROM lineshaft.task_live WHERE task_live.id = lock.holder_task_id AND task_live.is_batch)
            )
        WHEN NOT needed.is_shared THEN true
        WHEN EXISTS (
            SELECT FROM lineshaft.lock_share WHERE lock_share.key = needed.key AND lock_share.holder_task_id = needed.holder
        ) THEN false
        ELSE needed.key = ANY (p_writers) OR EXISTS (
            SELECT FROM lineshaft.task_live AS writer
            WHERE writer.lock_key = needed.key
              AND writer.parked = 'lock' AND (writer.admission -> 'locks' ->> writer.lock_key) IS DISTINCT FROM 'true'
        )
    END
    ORDER BY needed.key COLLATE "C"
    LIMIT 1
$$;
COMMENT ON FUNCTION lineshaft.refused_lock_1(text, text, text, jsonb, timestamptz, text[]) IS 'The first document lock that a task can''t have now; null: it can have all.';

-- Each statement of the function sees what others have committed before it got the rows of the locks.
CREATE FUNCTION lineshaft.take_locks_1(
    p_agent text, p_now timestamptz, p_ids text[], p_owners text[], p_lock_keys text[], p_locks jsonb[], p_seconds double precision[],
    OUT id text, OUT granted bigint, OUT refused_key text, OUT others text[]
) RETURNS SETOF record LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    asked text[];
    writers text[] := '{}';
    task record;
BEGIN
    asked := ARRAY(
        SELECT DISTINCT needed.key COLLATE "C"
        FROM unnest(p_ids, p_owners, p_lock_keys, p_locks) AS new (id, owner, lock_key, locks)
        CROSS JOIN LATERAL lineshaft.locks_of_1(new.id, new.owner, new.lock_key, new.locks) AS needed
        ORDER BY 1
    );
    -- Locks the rows of all keys in order, free ones too: their new rows have no holder.
    INSERT INTO lineshaft.lock AS held (key, holder_task_id, token, acquired_at, expires_at)
    SELECT free.key, '', 0, p_now, p_now FROM unnest(asked) WITH ORDINALITY AS free (key, n) ORDER BY free.n
    ON CONFLICT ON CONSTRAINT lock_pkey DO UPDATE SET token = held.token WHERE false;

    FOR task IN
        SELECT * FROM unnest(p_ids, p_owners, p_lock_keys, p_locks, p_seconds) WITH ORDINALITY AS new (id, owner, lock_key, locks, seconds, n)
        ORDER BY n
    LOOP
        id := task.id;
        granted := NULL;
        others := '{}';
        refused_key := lineshaft.refused_lock_1(task.id, task.owner, task.lock_key, task.locks, p_now, writers);
        IF refused_key IS NULL THEN
            granted := nextval('lineshaft.lock_token');
            UPDATE lineshaft.lock
            SET holder_task_id = CASE WHEN needed.is_shared THEN 'shared:' || needed.holder ELSE needed.holder END,
                agent_id = CASE WHEN NOT needed.is_shared THEN p_agent END,
                token = granted, acquired_at = p_now,
                expires_at = CASE
                    WHEN needed.is_shared THEN timestamptz '9999-01-01 00:00:00Z' ELSE p_now + task.seconds * interval '1 second'
                END
            FROM lineshaft.locks_of_1(task.id, task.owner, task.lock_key, task.locks) AS needed
            WHERE lock.key = needed.key AND NOT (needed.is_shared AND lock.holder_task_id LIKE 'shared:%');
            INSERT INTO lineshaft.lock_share AS share (key, holder_task_id, agent_id, token, acquired_at, expires_at)
            SELECT needed.key, needed.holder, p_agent, granted, p_now, p_now + task.seconds * interval '1 second'
            FROM lineshaft.locks_of_1(task.id, task.owner, task.lock_key, task.locks) AS needed
            WHERE needed.is_shared
            ON CONFLICT ON CONSTRAINT lock_share_pkey DO UPDATE
                SET agent_id = excluded.agent_id, token = excluded.token, acquired_at = excluded.acquired_at, expires_at = excluded.expires_at;
            -- Other readers may wait for what it reads.
            others := ARRAY(
                SELECT needed.key
                FROM lineshaft.locks_of_1(task.id, task.owner, task.lock_key, task.locks) AS needed
                WHERE needed.is_shared AND (
                    SELECT true FROM lineshaft.task_live AS live
                    WHERE live.status = 'READY' AND live.lock_key = needed.key AND live.parked = 'lock'
                    LIMIT 1
                )
            );
        ELSIF (task.locks ->> refused_key) IS DISTINCT FROM 'true' THEN
            writers := writers || refused_key;
        END IF;
        RETURN NEXT;
    END LOOP;
    DELETE FROM lineshaft.lock WHERE lock.key = ANY (asked) AND lock.holder_task_id = '';
END $$;
COMMENT ON FUNCTION lineshaft.take_locks_1(text, timestamptz, text[], text[], text[], jsonb[], double precision[]) IS 'Takes all document locks of a task or none, for each task in this order; others: locks whose waiters may be able to go on.';

-- Only what the holders still have: a lock that expired and was granted to another task stays with that one. A holder that is null is any.
CREATE FUNCTION lineshaft.release_locks_1(
    p_keys text[], p_holders text[], p_tokens bigint[], p_expired_at timestamptz,
    OUT key text, OUT holder_task_id text, OUT agent_id text, OUT token bigint, OUT is_gone boolean
) RETURNS SETOF record LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    -- In order of key, as claims.
    PERFORM FROM lineshaft.lock WHERE lock.key = ANY (p_keys) ORDER BY lock.key FOR UPDATE;
    RETURN QUERY
    DELETE FROM lineshaft.lock
    USING unnest(p_keys, p_holders) AS held (key, holder)
    WHERE lock.key = held.key AND lock.holder_task_id = coalesce(held.holder, lock.holder_task_id)
      AND NOT lock.holder_task_id LIKE 'shared:%' AND (p_expired_at IS NULL OR lock.expires_at < p_expired_at)
    RETURNING lock.key, lock.holder_task_id, lock.agent_id, lock.token, true;
    RETURN QUERY
    DELETE FROM lineshaft.lock_share AS share
    USING unnest(p_keys, p_holders) AS held (key, holder)
    WHERE share.key = held.key AND share.holder_task_id = coalesce(held.holder, share.holder_task_id)
      AND (p_expired_at IS NULL OR share.expires_at < p_expired_at)
    RETURNING share.key, share.holder_task_id, share.agent_id, share.token, true;
    DELETE FROM lineshaft.lock
    WHERE lock.key = ANY (p_keys) AND lock.holder_task_id LIKE 'shared:%'
      AND NOT EXISTS (SELECT FROM lineshaft.lock_share AS share WHERE share.key = lock.key);
    IF p_tokens IS NOT NULL THEN
        RETURN QUERY
        SELECT lock.key, lock.holder_task_id, lock.agent_id, lock.token, false
        FROM lineshaft.lock
        WHERE lock.key = ANY (p_keys) AND lock.token = ANY (p_tokens) AND NOT lock.holder_task_id LIKE 'shared:%'
        UNION ALL
        SELECT share.key, share.holder_task_id, share.agent_id, share.token, false
        FROM lineshaft.lock_share AS share
        WHERE share.token = ANY (p_tokens);
    END IF;
END $$;
COMMENT ON FUNCTION lineshaft.release_locks_1(text[], text[], bigint[], timestamptz) IS 'Releases document locks, each of one holder; returns them, and those with these tokens that a batch keeps.';

CREATE FUNCTION lineshaft.has_locks_1(p_lock_key text, p_admission jsonb, p_token bigint) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT cardinality(keys) = (
        SELECT count(*) FROM lineshaft.lock
        WHERE lock.key = ANY (keys) AND lock.token = p_token AND NOT lock.holder_task_id LIKE 'shared:%'
    ) + (
        SELECT count(*) FROM lineshaft.lock_share AS share WHERE share.token = p_token AND share.key = ANY (keys)
    )
    FROM (SELECT lineshaft.lock_keys_1(p_lock_key, p_admission) AS keys) AS needed
$$;
COMMENT ON FUNCTION lineshaft.has_locks_1(text, jsonb, bigint) IS 'Whether a claim still has all document locks that it was given.';

CREATE FUNCTION lineshaft.keep_locks_1(p_ids text[]) RETURNS SETOF text LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM FROM lineshaft.lock
    WHERE lock.key = ANY (ARRAY(
        SELECT unnest(lineshaft.lock_keys_1(live.lock_key, live.admission)) FROM lineshaft.task_live AS live WHERE live.id = ANY (p_ids)
    ))
    ORDER BY lock.key
    FOR UPDATE;
    RETURN QUERY
    SELECT live.id FROM lineshaft.task_live AS live
    WHERE live.id = ANY (p_ids) AND lineshaft.has_locks_1(live.lock_key, live.admission, live.lock_token);
END $$;
COMMENT ON FUNCTION lineshaft.keep_locks_1(text[]) IS 'Those of these held tasks whose claims still have all their document locks, which are kept until the end of the transaction.';
