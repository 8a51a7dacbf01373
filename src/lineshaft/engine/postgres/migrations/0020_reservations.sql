-- Reservations: what a handler may use of the rates of a key, before it uses it.

-- One row for each quota that counts it. It ends with its claim; what was booked drops out of the window in any case, so nothing leaks.
CREATE TABLE lineshaft.reservation (
    taken_at timestamptz NOT NULL,
    part bigint NOT NULL,
    per_sec double precision NOT NULL,
    epoch integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    quota text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C",
    unit text NOT NULL,
    amount numeric(20, 6) NOT NULL,
    CONSTRAINT reservation_pkey PRIMARY KEY (id, quota)
);
CREATE UNIQUE INDEX reservation_idempotency_key ON lineshaft.reservation (task_id, epoch, idempotency_key, quota);
CREATE INDEX reservation_quota ON lineshaft.reservation (quota, taken_at);
COMMENT ON TABLE lineshaft.reservation IS 'What handlers have acquired of quotas with rates; each ends with its claim.';
COMMENT ON COLUMN lineshaft.reservation.taken_at IS 'When it was acquired.';
COMMENT ON COLUMN lineshaft.reservation.part IS 'The part of the window that it is booked in, as in quota_use.';
COMMENT ON COLUMN lineshaft.reservation.per_sec IS 'The length of the window, in seconds, that the part belongs to.';
COMMENT ON COLUMN lineshaft.reservation.epoch IS 'The claim.';
COMMENT ON COLUMN lineshaft.reservation.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.reservation.quota IS 'The quota.';
COMMENT ON COLUMN lineshaft.reservation.key IS 'The key, as in quota_use; empty: all keys share the limit.';
COMMENT ON COLUMN lineshaft.reservation.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.reservation.idempotency_key IS 'A repeated call with this key gets the same reservation.';
COMMENT ON COLUMN lineshaft.reservation.unit IS 'What the rate counts.';
COMMENT ON COLUMN lineshaft.reservation.amount IS 'How much of it is booked: what was reserved, then what was used.';

-- Use of one key of a quota is counted and booked under this lock, which a transaction takes after all locks on rows. A claim takes other locks.
CREATE FUNCTION lineshaft.lock_use_1(p_quota text, p_key text) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.use ' || p_quota || chr(31) || p_key, 0))
$$;
COMMENT ON FUNCTION lineshaft.lock_use_1(text, text) IS 'Locks the use of one key of a quota.';

-- Books `p_units` in all quotas of `p_key` with a rate of these units, or in none of them.
--
-- Verdicts: `booked`; `free`: no quota counts them; `full`, with when there is room in all of them; `never`: more than the limit itself;
-- `stale`: the claim isn't held. The other columns are of the quota that decided.
CREATE FUNCTION lineshaft.acquire_1(
    p_task_id text, p_epoch integer, p_id text, p_key text, p_idempotency_key text, p_units jsonb, p_now timestamptz,
    OUT verdict text, OUT reservation text, OUT quota text, OUT unit text, OUT asked numeric, OUT amount numeric, OUT per_sec double precision,
    OUT wait_sec double precision
) LANGUAGE plpgsql AS $$
DECLARE
    rate record;
    locked text[] := '{}';
    now timestamptz;
    free_at timestamptz;
    latest timestamptz;
BEGIN
    PERFORM FROM lineshaft.task_live AS live WHERE live.id = p_task_id AND live.epoch = p_epoch AND live.status = 'RUNNING';
    IF NOT FOUND THEN
        verdict := 'stale';
        RETURN;
    END IF;
    FOR rate IN
        SELECT known.name, known.rate_unit, known.rate_amount, known.rate_per_sec, CASE WHEN known.shares_limit THEN '' ELSE p_key END AS key,
            coalesce((p_units ->> known.rate_unit)::numeric, 0) AS asked
        FROM lineshaft.quota AS known
        WHERE known.match = ANY (lineshaft.quota_patterns_1(p_key)) AND known.rate_unit <> 'tasks'
        ORDER BY known.name
    LOOP
        IF rate.asked > rate.rate_amount THEN
            SELECT 'never', rate.name, rate.rate_unit, rate.asked, rate.rate_amount, rate.rate_per_sec
            INTO verdict, quota, unit, asked, amount, per_sec;
            RETURN;
        END IF;
        PERFORM lineshaft.lock_use_1(rate.name, rate.key);
        locked := locked || rate.name;
    END LOOP;
    IF locked = '{}' THEN
        verdict := 'free';
        RETURN;
    END IF;
    IF p_idempotency_key IS NOT NULL THEN
        SELECT 'booked', known.id INTO verdict, reservation
        FROM lineshaft.reservation AS known
        WHERE known.task_id = p_task_id AND known.epoch = p_epoch AND known.idempotency_key = p_idempotency_key LIMIT 1;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    -- Statements from here on see everything that was booked before the locks.
    now := coalesce(p_now, clock_timestamp());
    FOR rate IN
        SELECT known.name, known.rate_unit, known.rate_amount, known.rate_per_sec, CASE WHEN known.shares_limit THEN '' ELSE p_key END AS key,
            coalesce((p_units ->> known.rate_unit)::numeric, 0) AS asked
        FROM lineshaft.quota AS known WHERE known.name = ANY (locked) AND known.rate_unit <> 'tasks' ORDER BY known.name
    LOOP
        -- Nothing may begin where the limit is reached, even if it doesn't say how much it will use.
        free_at := lineshaft.rate_free_at_1(
            rate.name, rate.key, rate.rate_amount, rate.rate_per_sec, greatest(rate.asked, 0.000001), now
        );
        IF free_at > now AND coalesce(free_at > latest, true) THEN
            latest := free_at;
            SELECT 'full', rate.name, rate.rate_unit, rate.asked, rate.rate_amount, rate.rate_per_sec
            INTO verdict, quota, unit, asked, amount, per_sec;
        END IF;
    END LOOP;
    IF verdict = 'full' THEN
        -- The part after an instant begins at that instant, but for rounding.
        wait_sec := extract(epoch FROM latest - now) + 0.001;
        RETURN;
    END IF;
    verdict := 'booked';
    reservation := p_id;
    WITH booked AS (
        SELECT known.name, CASE WHEN known.shares_limit THEN '' ELSE p_key END AS key, known.rate_unit, known.rate_per_sec,
            lineshaft.part_1(now, known.rate_per_sec) AS part, coalesce((p_units ->> known.rate_unit)::numeric, 0) AS asked
        FROM lineshaft.quota AS known WHERE known.name = ANY (locked) AND known.rate_unit <> 'tasks'
    ), used AS (
        INSERT INTO lineshaft.quota_use AS used (part, quota, key, amount)
        SELECT booked.part, booked.name, booked.key, booked.asked FROM booked WHERE booked.asked > 0
        ON CONFLICT ON CONSTRAINT quota_use_pkey DO UPDATE SET amount = used.amount + excluded.amount
    )
    INSERT INTO lineshaft.reservation (taken_at, part, per_sec, epoch, id, quota, key, task_id, idempotency_key, unit, amount)
    SELECT now, booked.part, booked.rate_per_sec, p_epoch, p_id, booked.name, booked.key, p_task_id, p_idempotency_key, booked.rate_unit, booked.asked
    FROM booked;
END $$;
COMMENT ON FUNCTION lineshaft.acquire_1(text, integer, text, text, text, jsonb, timestamptz) IS 'Reserves units of the rates of a key.';

-- Books the difference between what a reservation counts and what was used; a unit that `p_units` doesn't name stays as it is. Where the provider
-- has less left than the quota, the difference is booked now: others use it too.
--
-- Verdicts: `settled`, `stale`, `unknown`.
CREATE FUNCTION lineshaft.settle_1(
    p_task_id text, p_epoch integer, p_id text, p_units jsonb, p_left jsonb, p_now timestamptz, OUT verdict text
) LANGUAGE plpgsql AS $$
DECLARE
    item record;
    now timestamptz;
    total numeric;
BEGIN
    PERFORM FROM lineshaft.task_live AS live WHERE live.id = p_task_id AND live.epoch = p_epoch AND live.status = 'RUNNING';
    IF NOT FOUND THEN
        verdict := 'stale';
        RETURN;
    END IF;
    PERFORM FROM lineshaft.reservation AS known
    WHERE known.id = p_id AND known.task_id = p_task_id AND known.epoch = p_epoch
    ORDER BY known.quota FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        verdict := 'unknown';
        RETURN;
    END IF;
    verdict := 'settled';
    PERFORM lineshaft.lock_use_1(known.quota, known.key) FROM (
        SELECT mine.quota, mine.key FROM lineshaft.reservation AS mine WHERE mine.id = p_id ORDER BY mine.quota OFFSET 0
    ) AS known;
    now := coalesce(p_now, clock_timestamp());
    FOR item IN
        -- A quota whose rate has changed since doesn't count in the same parts.
        SELECT mine.quota, mine.key, mine.part, mine.per_sec, limited.rate_amount, (p_left ->> mine.unit)::numeric AS left_over,
            coalesce((p_units ->> mine.unit)::numeric, mine.amount) - mine.amount AS difference
        FROM lineshaft.reservation AS mine
        JOIN lineshaft.quota AS limited
            ON limited.name = mine.quota AND limited.rate_unit = mine.unit AND limited.rate_per_sec = mine.per_sec
        WHERE mine.id = p_id ORDER BY mine.quota
    LOOP
        IF item.difference < 0 THEN
            UPDATE lineshaft.quota_use AS used SET amount = greatest(used.amount + item.difference, 0)
            WHERE used.quota = item.quota AND used.key = item.key AND used.part = item.part;
        ELSIF item.difference > 0 THEN
            INSERT INTO lineshaft.quota_use AS used (part, quota, key, amount) VALUES (item.part, item.quota, item.key, item.difference)
            ON CONFLICT ON CONSTRAINT quota_use_pkey DO UPDATE SET amount = used.amount + excluded.amount;
        END IF;
        IF item.left_over IS NOT NULL THEN
            total := lineshaft.rate_used_1(item.quota, item.key, item.per_sec, now);
            IF item.rate_amount - total > item.left_over THEN
                INSERT INTO lineshaft.quota_use AS used (part, quota, key, amount)
                VALUES (lineshaft.part_1(now, item.per_sec), item.quota, item.key, item.rate_amount - total - item.left_over)
                ON CONFLICT ON CONSTRAINT quota_use_pkey DO UPDATE SET amount = used.amount + excluded.amount;
            END IF;
        END IF;
    END LOOP;
    UPDATE lineshaft.reservation AS mine SET amount = coalesce((p_units ->> mine.unit)::numeric, mine.amount) WHERE mine.id = p_id;
END $$;
COMMENT ON FUNCTION lineshaft.settle_1(text, integer, text, jsonb, jsonb, timestamptz) IS 'Books what a reservation has really used.';
