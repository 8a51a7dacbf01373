-- Fair shares: tasks with a fair_key wait for the turn of their key. Processes of the previous version claim none of them: they are parked.

-- 0: held; 1: waits for its turn; 2: can be claimed without a turn, because its lock, its quota or money has become free; 3: anything else.
CREATE FUNCTION lineshaft.fair_state_1(p_status lineshaft.task_status, p_parked text, p_lease_until timestamptz) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_lease_until IS NOT NULL THEN 0 WHEN p_status <> 'READY' THEN 3 WHEN p_parked = 'fair' THEN 1 WHEN p_parked IS NULL THEN 2 ELSE 3 END;
COMMENT ON FUNCTION lineshaft.fair_state_1(lineshaft.task_status, text, timestamptz) IS 'Whether a task with a fair_key is held, or waits for its turn.';

-- All tasks with a fair_key; those that are held, by key, and those that wait for a turn, by key, lane and rank.
CREATE INDEX task_live_fair ON lineshaft.task_live (
    lineshaft.fair_state_1(status, parked, lease_until), ((admission ->> 'fair') COLLATE "C"), lane_id, rank, submission_no
) WHERE (admission ->> 'fair') IS NOT NULL;
-- Those that wait for a turn, by rank, without those that are known to be behind another of their key: those have a parked_key.
CREATE INDEX task_live_turn ON lineshaft.task_live (lane_id, rank, submission_no)
    WHERE status = 'READY' AND parked = 'fair' AND parked_key IS NULL;
COMMENT ON COLUMN lineshaft.task_live.parked_key IS 'What a task that is parked for a quota waits for; or the fair_key of one that is behind another of its key.';

-- Precedes everything that adds tasks with a fair_key: see fair_tasks_ended_1.
CREATE FUNCTION lineshaft.fair_tasks_exist_1() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('lineshaft.fair tasks', 0));
    IF (SELECT quota_kinds & 64 = 0 FROM lineshaft.limits) THEN
        UPDATE lineshaft.limits SET quota_kinds = quota_kinds | 64 WHERE quota_kinds & 64 = 0;
    END IF;
END $$;
COMMENT ON FUNCTION lineshaft.fair_tasks_exist_1() IS 'Makes claims look at fair shares.';

-- Claims need not look at fair shares any more, or, if something was missed, must look. Returns whether that has changed.
CREATE FUNCTION lineshaft.fair_tasks_ended_1() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('lineshaft.fair tasks', 0)) THEN
        RETURN false;
    END IF;
    -- A newer snapshot than the lock.
    UPDATE lineshaft.limits SET quota_kinds = quota_kinds # 64
    WHERE (quota_kinds & 64 <> 0) <> EXISTS (SELECT FROM lineshaft.task_live AS live WHERE (live.admission ->> 'fair') IS NOT NULL);
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION lineshaft.fair_tasks_ended_1() IS 'Lets claims not look at fair shares.';

-- The weight of a key: the least of the quotas that match it.
CREATE FUNCTION lineshaft.fair_weight_1(p_key text) RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT coalesce(min(quota.weight), 1) FROM lineshaft.quota WHERE quota.match = ANY (lineshaft.quota_patterns_1(p_key))
$$;
COMMENT ON FUNCTION lineshaft.fair_weight_1(text) IS 'The weight of a key.';

CREATE FUNCTION lineshaft.fair_held_1(p_key text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM lineshaft.task_live AS live
    WHERE lineshaft.fair_state_1(live.status, live.parked, live.lease_until) = 0 AND (live.admission ->> 'fair') IS NOT NULL
      AND ((live.admission ->> 'fair') COLLATE "C") = p_key
$$;
COMMENT ON FUNCTION lineshaft.fair_held_1(text) IS 'How many tasks with a fair_key are held.';

-- The tier of an effective priority, as in model/priority.py, as a number.
CREATE FUNCTION lineshaft.tier_1(p_effective double precision) RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_effective < 10 THEN 0 WHEN p_effective < 30 THEN 1 WHEN p_effective < 60 THEN 2 WHEN p_effective < 80 THEN 3 ELSE 4 END;
COMMENT ON FUNCTION lineshaft.tier_1(double precision) IS 'The tier of an effective priority, as a number.';

-- Lets the claim that follows in this transaction see the tasks whose turn it is: of the keys with tasks in lanes that suit the instance, within
-- one tier those with the fewest held tasks per weight, then those with the best task; as many as the claim has room for. The transaction
-- holds the lock of turns, so that no two claims count the same; finish_turns_1 ends it. Other transactions never see these tasks.
--
-- A key without held tasks comes first in its tier, so it is enough to read along task_live_turn until there are as many of these as turns.
-- Tasks behind another of their key are marked on the way, so that the next claim doesn't meet them. Only if there are too few such keys does
-- it count for all keys of the tier, and, if these have too few tasks, for all that wait: they are then hardly more than keys with held tasks.
--
-- `p_passed_over` are lanes from which the claim could take nothing. With `p_ahead` tasks whose quotas are full, as far as one can see without
-- their locks, are parked for these, and don't get a turn; `names` are those of the quotas. `is_cut`: more could follow, but might overtake
-- others, because the claim orders turns and all other tasks by effective priority alone.
CREATE FUNCTION lineshaft.make_turns_1(
    p_agent text, p_incarnation integer, p_limit integer, p_types text[], p_probing text[], p_passed_over integer[], p_ahead integer, p_now timestamptz,
    OUT ids text[], OUT lanes integer[], OUT keys text[], OUT names text[], OUT is_cut boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    me record;
    room integer;
    wanted integer;
    most integer;
    barred text[];
    types text[];
    accounts text[];
    lane_probing text[];
    lane_ids integer[];
    lane_aged double precision[];
    at double precision := lineshaft.minutes(p_now);
    best_tier integer;
    is_enough boolean := false;
    is_complete boolean := false;
    has_weights boolean;
    pair_keys text[];
    pair_lanes integer[];
    pair_aged double precision[];
    pair_effective double precision[];
    pair_nos bigint[];
    best_keys text[];
    best_held bigint[];
    best_weights double precision[];
    seen_ids text[];
    seen_keys text[];
    seen_lanes integer[];
    seen_aged double precision[];
    seen_effective double precision[];
    seen_nos bigint[];
    seen_places bigint[];
    best_effective double precision;
    complete_to double precision;
    has_others boolean;
    turn_ids text[];
    turn_effective double precision[];
    turn_lanes integer[];
    turn_keys text[];
    worst double precision := '-infinity';
BEGIN
    ids := '{}'; lanes := '{}'; keys := '{}'; names := '{}'; is_cut := false;
    SELECT instance.capabilities, instance.types, instance.models_available, instance.accounts,
        least(p_limit, coalesce(instance.set_max_tasks, instance.max_concurrent_tasks) - instance.held) AS room, limits.quota_kinds
    INTO me
    FROM lineshaft.instance CROSS JOIN lineshaft.limits
    WHERE instance.agent_id = p_agent AND instance.incarnation = p_incarnation AND instance.status = 'active' AND instance.set_status IS NULL;
    room := me.room;
    IF room IS NULL OR room <= 0 THEN
        RETURN;
    END IF;
    wanted := room + CASE WHEN me.quota_kinds & 48 <> 0 THEN coalesce(p_ahead, 0) ELSE 0 END;
    barred := ARRAY(
        SELECT slowdown.key FROM lineshaft.slowdown WHERE slowdown.until > p_now
        UNION ALL
        SELECT breaker.key FROM lineshaft.breaker WHERE breaker.state <> 'closed' AND (breaker.key = ANY (p_probing)) IS NOT TRUE
    );
    types := barred || ARRAY(SELECT pause.type FROM lineshaft.pause);
    IF 'agent:' || p_agent = ANY (barred) THEN
        RETURN;
    END IF;
    lane_probing := p_probing;
    IF me.accounts <> '{}' THEN
        accounts := lineshaft.open_accounts_1(me.accounts, p_probing, p_now);
        IF accounts = '{}' THEN
            RETURN;
        END IF;
        -- Any of its tasks probes its account.
        IF EXISTS (SELECT FROM unnest(accounts) AS account (name) WHERE 'account:' || account.name = ANY (p_probing)) THEN
            lane_probing := NULL;
        END IF;
    END IF;

    -- What has become free waits for its turn like all others.
    UPDATE lineshaft.task_live AS live SET parked = 'fair'
    WHERE live.id = ANY (ARRAY(
        SELECT free.id FROM lineshaft.task_live AS free
        WHERE lineshaft.fair_state_1(free.status, free.parked, free.lease_until) = 2 AND (free.admission ->> 'fair') IS NOT NULL
        FOR NO KEY UPDATE SKIP LOCKED
    ));
    WITH RECURSIVE waiting AS (
        (SELECT live.lane_id AS id FROM lineshaft.task_live AS live
         WHERE live.status = 'READY' AND live.parked = 'fair' AND live.parked_key IS NULL ORDER BY live.lane_id LIMIT 1)
        UNION ALL
        SELECT (
            SELECT live.lane_id FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.parked = 'fair' AND live.parked_key IS NULL AND live.lane_id > waiting.id ORDER BY live.lane_id LIMIT 1
        )
        FROM waiting WHERE waiting.id IS NOT NULL
    )
    SELECT array_agg(lane.id ORDER BY lane.id), array_agg(lane.boost_per_minute * at ORDER BY lane.id)
    INTO lane_ids, lane_aged
    FROM waiting
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.id OFFSET 0) AS lane
    WHERE lineshaft.has_turns_1(lane, me.types, me.capabilities, me.models_available, p_types, lane_probing, barred, types)
      AND lane.id <> ALL (p_passed_over);

    most := 32 + 2 * wanted;
    WHILE lane_ids IS NOT NULL LOOP
        -- Ranks are effective priorities in millionths, as in claim_tasks; `place` is that among those of the key in the lane.
        SELECT array_agg(seen.id), array_agg(seen.key), array_agg(seen.lane_id), array_agg(seen.aged), array_agg(seen.effective),
            array_agg(seen.submission_no), array_agg(seen.place), min(seen.effective), min(seen.last) FILTER (WHERE seen.is_cut)
        INTO seen_ids, seen_keys, seen_lanes, seen_aged, seen_effective, seen_nos, seen_places, best_effective, complete_to
        FROM (
            SELECT next.id, next.key, lane.id AS lane_id, lane.aged, round((next.rank - lane.aged) * 1e6) AS effective, next.submission_no,
                row_number() OVER (PARTITION BY lane.id, next.key ORDER BY next.rank, next.submission_no) AS place,
                max(round((next.rank - lane.aged) * 1e6)) OVER (PARTITION BY lane.id) AS last, count(*) OVER (PARTITION BY lane.id) = most AS is_cut
            FROM unnest(lane_ids, lane_aged) AS lane (id, aged)
            CROSS JOIN LATERAL (
                SELECT live.id, live.rank, live.submission_no, live.admission ->> 'fair' AS key FROM lineshaft.task_live AS live
                WHERE live.status = 'READY' AND live.parked = 'fair' AND live.parked_key IS NULL AND live.lane_id = lane.id
                  AND NOT lineshaft.is_expired_1(live.expires, live.deadline, p_now)
                ORDER BY live.rank, live.submission_no
                LIMIT most
                OFFSET 0
            ) AS next
        ) AS seen;
        EXIT WHEN seen_ids IS NULL;
        best_tier := lineshaft.tier_1(best_effective / 1e6);
        -- The first task of each key that holds nothing.
        SELECT array_agg(idle.id ORDER BY idle.effective, idle.submission_no), array_agg(idle.effective ORDER BY idle.effective, idle.submission_no),
            array_agg(idle.lane_id ORDER BY idle.effective, idle.submission_no), array_agg(idle.key ORDER BY idle.effective, idle.submission_no)
        INTO turn_ids, turn_effective, turn_lanes, turn_keys
        FROM (
            SELECT first.*
            FROM (
                SELECT * FROM (
                    SELECT DISTINCT ON (seen.key) seen.*
                    FROM unnest(seen_ids, seen_keys, seen_lanes, seen_effective, seen_nos, seen_places)
                        AS seen (id, key, lane_id, effective, submission_no, place)
                    WHERE seen.place = 1 AND lineshaft.tier_1(seen.effective / 1e6) = best_tier
                      AND (complete_to IS NULL OR seen.effective <= complete_to)
                    ORDER BY seen.key, seen.effective, seen.submission_no
                ) AS of_key
                ORDER BY of_key.effective, of_key.submission_no
                OFFSET 0
            ) AS first
            WHERE (
                SELECT true FROM lineshaft.task_live AS held
                WHERE lineshaft.fair_state_1(held.status, held.parked, held.lease_until) = 0 AND (held.admission ->> 'fair') IS NOT NULL
                  AND ((held.admission ->> 'fair') COLLATE "C") = first.key
                LIMIT 1
            ) IS NULL
            LIMIT wanted
        ) AS idle;
        is_enough := coalesce(cardinality(turn_ids) >= wanted, false);
        is_complete := complete_to IS NULL OR lineshaft.tier_1(complete_to / 1e6) > best_tier;
        EXIT WHEN is_enough OR is_complete OR most > 200000;
        most := most * 8;
    END LOOP;
    -- Some thousands at a time.
    UPDATE lineshaft.task_live AS live SET parked_key = live.admission ->> 'fair'
    WHERE live.id = ANY (ARRAY(
        SELECT locked.id
        FROM (
            SELECT seen.id FROM unnest(seen_ids, seen_places) AS seen (id, place) WHERE seen.place > 1 LIMIT 5000
        ) AS behind
        CROSS JOIN LATERAL (
            SELECT locked.id FROM lineshaft.task_live AS locked
            WHERE locked.id = behind.id AND locked.status = 'READY' AND locked.parked = 'fair' AND locked.parked_key IS NULL
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS locked
    ));

    has_weights := EXISTS (SELECT FROM lineshaft.quota WHERE quota.weight <> 1);
    FOR stage IN 1..2 LOOP
        EXIT WHEN is_enough;
        IF stage = 1 THEN
            -- All keys of this tier are known.
            CONTINUE WHEN NOT is_complete;
            SELECT array_agg(seen.key), array_agg(seen.lane_id), array_agg(seen.aged), array_agg(seen.effective), array_agg(seen.submission_no)
            INTO pair_keys, pair_lanes, pair_aged, pair_effective, pair_nos
            FROM unnest(seen_keys, seen_lanes, seen_aged, seen_effective, seen_nos, seen_places)
                AS seen (key, lane_id, aged, effective, submission_no, place)
            WHERE seen.place = 1 AND lineshaft.tier_1(seen.effective / 1e6) = best_tier;
        ELSE
            WITH RECURSIVE waiting AS (
                (SELECT ((live.admission ->> 'fair') COLLATE "C") AS key, live.lane_id, live.rank, live.submission_no FROM lineshaft.task_live AS live
                 WHERE lineshaft.fair_state_1(live.status, live.parked, live.lease_until) = 1 AND (live.admission ->> 'fair') IS NOT NULL
                 ORDER BY ((live.admission ->> 'fair') COLLATE "C"), live.lane_id, live.rank, live.submission_no LIMIT 1)
                UNION ALL
                SELECT next.key, next.lane_id, next.rank, next.submission_no
                FROM waiting
                CROSS JOIN LATERAL (
                    SELECT ((live.admission ->> 'fair') COLLATE "C") AS key, live.lane_id, live.rank, live.submission_no FROM lineshaft.task_live AS live
                    WHERE lineshaft.fair_state_1(live.status, live.parked, live.lease_until) = 1 AND (live.admission ->> 'fair') IS NOT NULL
                      AND (((live.admission ->> 'fair') COLLATE "C"), live.lane_id) > (waiting.key, waiting.lane_id)
                    ORDER BY ((live.admission ->> 'fair') COLLATE "C"), live.lane_id, live.rank, live.submission_no LIMIT 1
                ) AS next
            )
            SELECT array_agg(waiting.key), array_agg(waiting.lane_id), array_agg(lane.boost_per_minute * at),
                array_agg(round((waiting.rank - lane.boost_per_minute * at) * 1e6)), array_agg(waiting.submission_no)
            INTO pair_keys, pair_lanes, pair_aged, pair_effective, pair_nos
            FROM waiting
            CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.lane_id OFFSET 0) AS lane
            WHERE lineshaft.has_turns_1(lane, me.types, me.capabilities, me.models_available, p_types, lane_probing, barred, types)
              AND lane.id <> ALL (p_passed_over);
        END IF;
        -- Of so many turns none is beyond so many keys, in the order of their first tasks.
        SELECT array_agg(of_key.key), array_agg(of_key.held), array_agg(of_key.weight) INTO best_keys, best_held, best_weights
        FROM (
            SELECT first.key, shares.held, shares.weight
            FROM (
                SELECT DISTINCT ON (pair.key) pair.*, lineshaft.tier_1(pair.effective / 1e6) AS tier
                FROM unnest(pair_keys, pair_effective, pair_nos) AS pair (key, effective, submission_no)
                ORDER BY pair.key, pair.effective, pair.submission_no
            ) AS first
            CROSS JOIN LATERAL (
                SELECT count(*) AS held, CASE WHEN has_weights THEN lineshaft.fair_weight_1(first.key) ELSE 1 END AS weight
                FROM lineshaft.task_live AS held
                WHERE lineshaft.fair_state_1(held.status, held.parked, held.lease_until) = 0 AND (held.admission ->> 'fair') IS NOT NULL
                  AND ((held.admission ->> 'fair') COLLATE "C") = first.key
                OFFSET 0
            ) AS shares
            ORDER BY first.tier, shares.held / shares.weight, first.effective, first.submission_no
            LIMIT CASE WHEN stage = 1 THEN wanted ELSE wanted + 1000 END
        ) AS of_key;
        SELECT array_agg(best.id ORDER BY best.n), array_agg(best.effective ORDER BY best.n), array_agg(best.lane_id ORDER BY best.n),
            array_agg(best.key ORDER BY best.n)
        INTO turn_ids, turn_effective, turn_lanes, turn_keys
        FROM (
            SELECT *, row_number() OVER (ORDER BY placed.tier, placed.share, placed.effective, placed.submission_no) AS n
            FROM (
                SELECT task.*, (
                    task.held + row_number() OVER (PARTITION BY task.key ORDER BY task.tier, task.effective, task.submission_no) - 1
                ) / task.weight AS share
                FROM (
                    SELECT next.id, next.submission_no, pair.key, pair.lane_id, chosen.held, chosen.weight,
                        round((next.rank - pair.aged) * 1e6) AS effective, lineshaft.tier_1(next.rank - pair.aged) AS tier
                    FROM (
                        SELECT pair.*, array_position(best_keys, pair.key) AS place
                        FROM unnest(pair_keys, pair_lanes, pair_aged) AS pair (key, lane_id, aged)
                        WHERE pair.key = ANY (best_keys)
                    ) AS pair
                    CROSS JOIN LATERAL (SELECT best_held[pair.place] AS held, best_weights[pair.place] AS weight) AS chosen
                    CROSS JOIN LATERAL (
                        SELECT live.id, live.rank, live.submission_no FROM lineshaft.task_live AS live
                        WHERE lineshaft.fair_state_1(live.status, live.parked, live.lease_until) = 1 AND (live.admission ->> 'fair') IS NOT NULL
                          AND ((live.admission ->> 'fair') COLLATE "C") = pair.key AND live.lane_id = pair.lane_id
                          AND NOT lineshaft.is_expired_1(live.expires, live.deadline, p_now)
                        ORDER BY live.rank, live.submission_no
                        LIMIT wanted
                        OFFSET 0
                    ) AS next
                ) AS task
                WHERE stage = 2 OR task.tier = best_tier
            ) AS placed
            ORDER BY n LIMIT wanted
        ) AS best;
        is_enough := coalesce(cardinality(turn_ids) >= wanted, false);
    END LOOP;
    IF turn_ids IS NULL THEN
        RETURN;
    END IF;

    IF wanted > room THEN
        SELECT full_ones.kept_ids, full_ones.kept_effective, full_ones.kept_lanes, full_ones.kept_keys, full_ones.names
        INTO turn_ids, turn_effective, turn_lanes, turn_keys, names
        FROM lineshaft.park_turns_1(me.quota_kinds, turn_ids, turn_effective, turn_lanes, turn_keys, p_now) AS full_ones;
    END IF;

    has_others := EXISTS (
        SELECT FROM lineshaft.generation
        CROSS JOIN LATERAL (
            SELECT FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = generation.no LIMIT 1
        ) AS other
    );
    FOR i IN 1..coalesce(cardinality(turn_ids), 0) LOOP
        EXIT WHEN cardinality(ids) = room;
        IF has_others AND turn_effective[i] < worst THEN
            is_cut := true;
            EXIT;
        END IF;
        -- Rows that others have locked are about to change.
        UPDATE lineshaft.task_live AS live
        SET parked = NULL, parked_key = NULL, generation = (SELECT last_value FROM lineshaft.generation_no WHERE pg_current_xact_id() IS NOT NULL)
        WHERE live.id = (
            SELECT free.id FROM lineshaft.task_live AS free
            WHERE free.id = turn_ids[i] AND free.status = 'READY' AND free.parked = 'fair' FOR NO KEY UPDATE SKIP LOCKED
        );
        IF FOUND THEN
            ids := ids || turn_ids[i];
            lanes := lanes || turn_lanes[i];
            keys := keys || turn_keys[i];
            worst := greatest(worst, turn_effective[i]);
        END IF;
    END LOOP;
END $$;
COMMENT ON FUNCTION lineshaft.make_turns_1(text, integer, integer, text[], text[], integer[], integer, timestamptz)
    IS 'Lets the claim that follows in this transaction see the tasks whose turn it is.';

-- Whether an instance may take turns of a lane now, as far as claim_tasks decides that by the lane and its model.
CREATE FUNCTION lineshaft.has_turns_1(
    p_lane lineshaft.lane, p_own_types text[], p_capabilities text[], p_models text[], p_types text[], p_probing text[], p_barred text[],
    p_barred_types text[]
) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT lineshaft.suits_1(p_lane.type, p_lane.required_capabilities, p_lane.models, p_own_types, p_capabilities, p_models)
        AND (p_types IS NULL OR p_lane.type = ANY (p_types))
        AND NOT lineshaft.is_barred_1(p_lane.type, p_barred_types)
        AND (chosen.model IS NOT NULL OR (p_lane.models = '{}' AND p_models = '{}'))
        AND (p_probing IS NULL OR p_lane.type = ANY (p_probing) OR coalesce('model:' || chosen.model = ANY (p_probing), false))
    FROM (SELECT lineshaft.chosen_model_1(p_lane.models, p_models, p_barred) AS model) AS chosen
$$;
COMMENT ON FUNCTION lineshaft.has_turns_1(lineshaft.lane, text[], text[], text[], text[], text[], text[], text[])
    IS 'Whether an instance may take turns of a lane now.';

-- Of these tasks, parks those whose own quotas have no room, as admit_1 does with those after a refused one; returns the others.
CREATE FUNCTION lineshaft.park_turns_1(
    p_kinds integer, p_ids text[], p_effective double precision[], p_lanes integer[], p_keys text[], p_now timestamptz,
    OUT kept_ids text[], OUT kept_effective double precision[], OUT kept_lanes integer[], OUT kept_keys text[], OUT names text[]
) LANGUAGE plpgsql AS $$
DECLARE
    full_ids text[];
    full_names text[];
BEGIN
    WITH turn AS MATERIALIZED (
        SELECT live.id, lineshaft.parking_keys_1(
            live.admission, CASE WHEN p_kinds & 16 <> 0 THEN (SELECT task.tags FROM lineshaft.task WHERE task.id = live.id) END
        ) AS keys
        FROM lineshaft.task_live AS live WHERE live.id = ANY (p_ids) AND live.status = 'READY' AND live.parked = 'fair'
        FOR NO KEY UPDATE SKIP LOCKED
    ),
    blocked AS MATERIALIZED (
        SELECT jsonb_object_agg(of.keys::text, full_one.name) AS names
        FROM (SELECT DISTINCT turn.keys FROM turn) AS of
        CROSS JOIN LATERAL (
            SELECT lineshaft.quota_name_1(quota, key) AS name FROM lineshaft.quotas_of_1(of.keys)
            WHERE lineshaft.quota_room_1(quota, key, max_running, rate_amount, rate_per_sec, p_now) <= 0
            ORDER BY 1
            LIMIT 1
        ) AS full_one
    ),
    parked AS (
        UPDATE lineshaft.task_live AS live SET parked = 'quota', parked_key = blocked.names ->> turn.keys::text
        FROM turn CROSS JOIN blocked
        WHERE live.id = turn.id AND blocked.names ? turn.keys::text
        RETURNING live.id, live.parked_key
    )
    SELECT array_agg(parked.id), array_agg(DISTINCT parked.parked_key) INTO full_ids, full_names FROM parked;
    names := coalesce(full_names, '{}');
    full_ids := coalesce(full_ids, '{}');
    IF full_ids <> '{}' THEN
        INSERT INTO lineshaft.quota_wake AS known (quota, key, at)
        SELECT rule.name, waiting.key, lineshaft.quota_wake_at_1(rule, waiting.key, p_now)
        FROM (SELECT split_part(name, chr(31), 1) AS quota, substr(name, strpos(name, chr(31)) + 1) AS key FROM unnest(names) AS name) AS waiting
        JOIN lineshaft.quota AS rule ON rule.name = waiting.quota
        ORDER BY 1, 2
        ON CONFLICT (quota, key) DO UPDATE SET at = least(known.at, excluded.at);
    END IF;
    SELECT array_agg(turn.id ORDER BY turn.n), array_agg(turn.effective ORDER BY turn.n), array_agg(turn.lane ORDER BY turn.n), array_agg(turn.key ORDER BY turn.n)
    INTO kept_ids, kept_effective, kept_lanes, kept_keys
    FROM unnest(p_ids, p_effective, p_lanes, p_keys) WITH ORDINALITY AS turn (id, effective, lane, key, n)
    WHERE turn.id <> ALL (full_ids);
END $$;
COMMENT ON FUNCTION lineshaft.park_turns_1(integer, text[], double precision[], integer[], text[], timestamptz)
    IS 'Parks tasks whose own quotas have no room.';

-- Lets the next claims see the first task of these keys in these lanes, without those that are about to go. It waits for no row.
CREATE FUNCTION lineshaft.show_next_1(p_keys text[], p_lanes integer[], p_without text[]) RETURNS void LANGUAGE sql AS $$
    UPDATE lineshaft.task_live AS live SET parked_key = NULL
    WHERE live.id = ANY (ARRAY(
        SELECT next.id
        FROM (SELECT DISTINCT turn.key, turn.lane FROM unnest(p_keys, p_lanes) AS turn (key, lane)) AS turn
        CROSS JOIN LATERAL (
            SELECT waiting.id, waiting.parked_key FROM lineshaft.task_live AS waiting
            WHERE lineshaft.fair_state_1(waiting.status, waiting.parked, waiting.lease_until) = 1 AND (waiting.admission ->> 'fair') IS NOT NULL
              AND ((waiting.admission ->> 'fair') COLLATE "C") = turn.key AND waiting.lane_id = turn.lane AND waiting.id <> ALL (p_without)
            ORDER BY waiting.rank, waiting.submission_no
            LIMIT 1
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS next
        WHERE next.parked_key IS NOT NULL
    ))
$$;
COMMENT ON FUNCTION lineshaft.show_next_1(text[], integer[], text[]) IS 'Lets the next claims see the first task of these keys in these lanes.';

-- After the claim: turns that weren't taken are over, and behind tasks that have left comes the next of their key. Returns the lanes of turns that
-- weren't taken.
CREATE FUNCTION lineshaft.finish_turns_1(p_ids text[], p_lanes integer[], p_keys text[]) RETURNS integer[] LANGUAGE plpgsql AS $$
DECLARE
    returned integer[];
BEGIN
    WITH back AS (
        UPDATE lineshaft.task_live AS live SET parked = 'fair'
        WHERE live.id = ANY (p_ids) AND live.status = 'READY' AND live.parked IS NULL
        RETURNING live.lane_id
    )
    SELECT coalesce(array_agg(DISTINCT back.lane_id), '{}') INTO returned FROM back;
    PERFORM lineshaft.show_next_1(p_keys, p_lanes, '{}');
    RETURN returned;
END $$;
COMMENT ON FUNCTION lineshaft.finish_turns_1(text[], integer[], text[]) IS 'Ends what make_turns_1 has begun.';

-- Lets the next claims see the first task of each key in each lane: one that left without a claim, because it was cancelled or moved, may have
-- had others behind it. Returns how many there were.
CREATE FUNCTION lineshaft.repair_turns_1() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    n integer;
BEGIN
    IF (SELECT quota_kinds & 64 = 0 FROM lineshaft.limits) THEN
        RETURN 0;
    END IF;
    WITH RECURSIVE waiting AS (
        (SELECT ((live.admission ->> 'fair') COLLATE "C") AS key, live.lane_id, live.id, live.parked_key FROM lineshaft.task_live AS live
         WHERE lineshaft.fair_state_1(live.status, live.parked, live.lease_until) = 1 AND (live.admission ->> 'fair') IS NOT NULL
         ORDER BY ((live.admission ->> 'fair') COLLATE "C"), live.lane_id, live.rank, live.submission_no LIMIT 1)
        UNION ALL
        SELECT next.key, next.lane_id, next.id, next.parked_key
        FROM waiting
        CROSS JOIN LATERAL (
            SELECT ((live.admission ->> 'fair') COLLATE "C") AS key, live.lane_id, live.id, live.parked_key FROM lineshaft.task_live AS live
            WHERE lineshaft.fair_state_1(live.status, live.parked, live.lease_until) = 1 AND (live.admission ->> 'fair') IS NOT NULL
              AND (((live.admission ->> 'fair') COLLATE "C"), live.lane_id) > (waiting.key, waiting.lane_id)
            ORDER BY ((live.admission ->> 'fair') COLLATE "C"), live.lane_id, live.rank, live.submission_no LIMIT 1
        ) AS next
    ),
    seen AS (
        UPDATE lineshaft.task_live AS live SET parked_key = NULL
        WHERE live.id = ANY (ARRAY(
            SELECT free.id FROM waiting
            CROSS JOIN LATERAL (
                SELECT free.id FROM lineshaft.task_live AS free
                WHERE free.id = waiting.id AND free.status = 'READY' AND free.parked = 'fair' FOR NO KEY UPDATE SKIP LOCKED
            ) AS free
            WHERE waiting.parked_key IS NOT NULL
        ))
        RETURNING live.lane_id
    )
    SELECT count(*) INTO n FROM seen;
    RETURN n;
END $$;
COMMENT ON FUNCTION lineshaft.repair_turns_1() IS 'Lets the next claims see the first task of each key in each lane.';
