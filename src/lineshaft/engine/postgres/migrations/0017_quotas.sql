-- Quotas: at most so many tasks of a key at once, or so much in a time. Processes of the previous version neither count nor obey them: they hold
-- once all processes have this version.

CREATE TABLE lineshaft.quota (
    changed_at timestamptz NOT NULL,
    rate_per_sec double precision,
    weight double precision NOT NULL DEFAULT 1,
    rate_amount numeric(20, 6),
    max_running integer,
    max_waiting integer,
    shares_limit boolean NOT NULL DEFAULT false,
    name text COLLATE "C" NOT NULL,
    match text COLLATE "C" NOT NULL,
    rate_unit text,
    CONSTRAINT quota_pkey PRIMARY KEY (name),
    CONSTRAINT rate_is_complete CHECK ((rate_amount IS NULL) = (rate_unit IS NULL) AND (rate_amount IS NULL) = (rate_per_sec IS NULL))
);
CREATE INDEX quota_match ON lineshaft.quota (match);
COMMENT ON TABLE lineshaft.quota IS 'Limits for all tasks with certain keys.';
COMMENT ON COLUMN lineshaft.quota.changed_at IS 'When it was last set.';
COMMENT ON COLUMN lineshaft.quota.rate_per_sec IS 'The length of the window of its rate, in seconds.';
COMMENT ON COLUMN lineshaft.quota.weight IS 'The share of its keys among tasks with a fair_key.';
COMMENT ON COLUMN lineshaft.quota.rate_amount IS 'At most so much in any window; null: no rate.';
COMMENT ON COLUMN lineshaft.quota.max_running IS 'At most so many tasks are held at once; null: no limit.';
COMMENT ON COLUMN lineshaft.quota.max_waiting IS 'Submissions are refused while so many tasks wait; null: no limit.';
COMMENT ON COLUMN lineshaft.quota.shares_limit IS 'All matching keys share one limit; otherwise each has its own.';
COMMENT ON COLUMN lineshaft.quota.name IS 'Its name.';
COMMENT ON COLUMN lineshaft.quota.match IS 'The key that it is for, or the beginning of keys, up to a colon, and an asterisk.';
COMMENT ON COLUMN lineshaft.quota.rate_unit IS 'What the rate counts: tasks, requests, tokens or usd.';

-- A slot counts only while a claim with its epoch holds the task: nothing has to be given back, however a claim ends.
CREATE TABLE lineshaft.slot (
    taken_at timestamptz NOT NULL,
    epoch integer NOT NULL,
    quota text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    CONSTRAINT slot_pkey PRIMARY KEY (quota, key, task_id)
);
CREATE INDEX slot_of_task ON lineshaft.slot (task_id);
COMMENT ON TABLE lineshaft.slot IS 'Places of held tasks in quotas with max_running.';
COMMENT ON COLUMN lineshaft.slot.taken_at IS 'When the task was claimed.';
COMMENT ON COLUMN lineshaft.slot.epoch IS 'The claim: the slot counts while it holds the task.';
COMMENT ON COLUMN lineshaft.slot.quota IS 'The quota.';
COMMENT ON COLUMN lineshaft.slot.key IS 'The key of the task.';
COMMENT ON COLUMN lineshaft.slot.task_id IS 'The task.';

-- Rates count in parts of their window, so that a look costs the same whatever the amount.
CREATE TABLE lineshaft.quota_use (
    part bigint NOT NULL,
    quota text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    amount numeric(20, 6) NOT NULL,
    CONSTRAINT quota_use_pkey PRIMARY KEY (quota, key, part)
);
COMMENT ON TABLE lineshaft.quota_use IS 'What was used of rates, by part of their window.';
COMMENT ON COLUMN lineshaft.quota_use.part IS 'Number of the part: the time since 1970, divided by a sixtieth of the window.';
COMMENT ON COLUMN lineshaft.quota_use.quota IS 'The quota.';
COMMENT ON COLUMN lineshaft.quota_use.key IS 'The key; empty: all keys share the limit.';
COMMENT ON COLUMN lineshaft.quota_use.amount IS 'How much, in units of the rate; reservations count in full until they are settled.';

-- Which kinds of keys have quotas, as a sum, so that claims look for quotas only where there may be some: 1 type, 2 model, 4 account, 8 agent,
-- 16 tag, 32 keys of tasks. 64: there are tasks with a fair_key; 128: a quota bounds waiting tasks.
ALTER TABLE lineshaft.limits ADD COLUMN quota_kinds integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN lineshaft.limits.quota_kinds IS 'Kinds of keys that quotas match, as a sum: 1 type, 2 model, 4 account, 8 agent, 16 tag, 32 keys of tasks; 64: there are tasks with a fair_key; 128: a quota bounds waiting tasks.';

-- NULL: there are more than a hundred, and claims look them up.
ALTER TABLE lineshaft.limits ADD COLUMN quota_lanes text[] DEFAULT '{}';
COMMENT ON COLUMN lineshaft.limits.quota_lanes IS 'What quotas of types, models, accounts and agents match, as patterns of LIKE; null: very many.';

ALTER TABLE lineshaft.task ADD COLUMN admission jsonb;
COMMENT ON COLUMN lineshaft.task.admission IS 'Its quota_keys, fair_key and lock_keys, as keys, fair and locks; null: none.';

ALTER TABLE lineshaft.task_live
    ADD COLUMN has_slots boolean NOT NULL DEFAULT false,
    ADD COLUMN account text,
    ADD COLUMN parked_key text COLLATE "C",
    ADD COLUMN admission jsonb;
COMMENT ON COLUMN lineshaft.task_live.has_slots IS 'Its claim has slots of quotas, or several document locks, to be released at its end.';
COMMENT ON COLUMN lineshaft.task_live.account IS 'The account of its instance that the claim uses.';
COMMENT ON COLUMN lineshaft.task_live.parked_key IS 'What a task that is parked for a quota waits for.';
COMMENT ON COLUMN lineshaft.task_live.admission IS 'As in task.';
CREATE INDEX task_live_parked_key ON lineshaft.task_live (parked_key, lane_id, rank, submission_no) WHERE parked_key IS NOT NULL;

CREATE INDEX task_live_quota_keys ON lineshaft.task_live USING gin ((admission -> 'keys')) WHERE admission IS NOT NULL;

ALTER TABLE lineshaft.instance ADD COLUMN accounts text[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN lineshaft.instance.accounts IS 'Accounts with providers that it works with; a claim chooses one.';

-- The patterns that match a key: the key itself, and each of its beginnings up to a colon with an asterisk.
CREATE FUNCTION lineshaft.quota_patterns_1(p_key text) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY[p_key] || ARRAY(
        SELECT left(p_key, n) || '*' FROM generate_series(1, length(p_key)) AS n WHERE substr(p_key, n, 1) = ':'
    )
$$;
COMMENT ON FUNCTION lineshaft.quota_patterns_1(text) IS 'The patterns of quotas that match a key.';

-- Whether a quota limits claims: others limit submissions, what handlers acquire, or nothing.
CREATE FUNCTION lineshaft.gates_claims_1(p_max_running integer, p_rate_unit text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT p_max_running IS NOT NULL OR p_rate_unit IS NOT DISTINCT FROM 'tasks'
$$;
COMMENT ON FUNCTION lineshaft.gates_claims_1(integer, text) IS 'Whether a quota limits claims.';

-- The bit of limits.quota_kinds for the keys that a quota matches.
CREATE FUNCTION lineshaft.quota_kind_1(p_match text) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE split_part(p_match, ':', 1)
        WHEN p_match THEN 32
        WHEN 'type' THEN 1 WHEN 'model' THEN 2 WHEN 'account' THEN 4 WHEN 'agent' THEN 8 WHEN 'tag' THEN 16
        ELSE 32
    END
$$;
COMMENT ON FUNCTION lineshaft.quota_kind_1(text) IS 'The bit of limits.quota_kinds for the keys that a quota matches.';

-- The number of the part of a rate's window that an instant is in.
CREATE FUNCTION lineshaft.part_1(p_at timestamptz, p_per_sec double precision) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT floor(extract(epoch FROM p_at) / (p_per_sec / 60))::bigint
$$;
COMMENT ON FUNCTION lineshaft.part_1(timestamptz, double precision) IS 'The number of the part of a rate''s window that an instant is in.';

-- When the tasks that wait for a quota are looked at again, though nobody has released a slot: a rate has room again, or a process died
-- between its commit and the look that follows. Each (quota, key) with parked tasks has a row, and each whose rate is used up.
CREATE TABLE lineshaft.quota_wake (
    at timestamptz NOT NULL,
    quota text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    CONSTRAINT quota_wake_pkey PRIMARY KEY (quota, key)
);
CREATE INDEX quota_wake_at ON lineshaft.quota_wake (at);
COMMENT ON TABLE lineshaft.quota_wake IS 'When tasks that wait for quotas are looked at again.';
COMMENT ON COLUMN lineshaft.quota_wake.at IS 'The instant.';
COMMENT ON COLUMN lineshaft.quota_wake.quota IS 'The quota.';
COMMENT ON COLUMN lineshaft.quota_wake.key IS 'The key; empty: all keys share the limit.';

-- What a quota counts for a key has a name: the quota, the character 31, and the key, which is empty where all keys share the limit.
CREATE FUNCTION lineshaft.quota_name_1(p_quota text, p_key text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT p_quota || chr(31) || p_key
$$;
COMMENT ON FUNCTION lineshaft.quota_name_1(text, text) IS 'The name of what a quota counts for a key.';

-- The quotas that limit claims of a task with these keys, each with the key that it counts for.
CREATE FUNCTION lineshaft.quotas_of_1(p_keys text[]) RETURNS TABLE (
    quota text, key text, parks boolean, max_running integer, rate_amount numeric, rate_per_sec double precision
) LANGUAGE sql STABLE AS $$
    SELECT DISTINCT quota.name, CASE WHEN quota.shares_limit THEN '' ELSE own.key END, lineshaft.quota_kind_1(quota.match) >= 16,
        quota.max_running, CASE WHEN quota.rate_unit = 'tasks' THEN quota.rate_amount END, quota.rate_per_sec
    FROM unnest(p_keys) AS own (key)
    CROSS JOIN LATERAL unnest(lineshaft.quota_patterns_1(own.key)) AS pattern (match)
    JOIN lineshaft.quota ON quota.match = pattern.match
    WHERE lineshaft.gates_claims_1(quota.max_running, quota.rate_unit)
$$;
COMMENT ON FUNCTION lineshaft.quotas_of_1(text[]) IS 'The quotas that limit claims of a task with these keys.';

-- The keys of a task that park it while their quotas are full: its tags and its own. The others close lanes.
CREATE FUNCTION lineshaft.parking_keys_1(p_admission jsonb, p_tags text[]) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY(SELECT jsonb_array_elements_text(p_admission -> 'keys')) || ARRAY(SELECT 'tag:' || tag FROM unnest(p_tags) AS tag)
$$;
COMMENT ON FUNCTION lineshaft.parking_keys_1(jsonb, text[]) IS 'The keys of a task that park it while their quotas are full.';

CREATE FUNCTION lineshaft.lane_keys_1(p_type text, p_model text, p_account text, p_agent text) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT array_remove(ARRAY['type:' || p_type, 'model:' || p_model, 'account:' || p_account, 'agent:' || p_agent], NULL)
$$;
COMMENT ON FUNCTION lineshaft.lane_keys_1(text, text, text, text) IS 'The keys that close lanes while their quotas are full.';

-- How many slots count, up to a number.
CREATE FUNCTION lineshaft.slots_held_1(p_quota text, p_key text, p_most bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM (
        SELECT FROM lineshaft.slot
        JOIN lineshaft.task_live AS holder ON holder.id = slot.task_id AND holder.epoch = slot.epoch AND holder.lease_until IS NOT NULL
        WHERE slot.quota = p_quota AND slot.key = p_key
        LIMIT p_most
    ) AS held
$$;
COMMENT ON FUNCTION lineshaft.slots_held_1(text, text, bigint) IS 'How many slots count, up to a number.';

-- What was used of a rate within its window. A part counts until all of it is out of the window: at most a sixtieth longer.
CREATE FUNCTION lineshaft.rate_used_1(p_quota text, p_key text, p_per_sec double precision, p_now timestamptz) RETURNS numeric
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(amount), 0) FROM lineshaft.quota_use
    WHERE quota = p_quota AND key = p_key AND part >= lineshaft.part_1(p_now, p_per_sec) - 60
$$;
COMMENT ON FUNCTION lineshaft.rate_used_1(text, text, double precision, timestamptz) IS 'What was used of a rate within its window.';

-- When a rate has room for so many units: as soon as enough of the oldest parts have left the window. NULL: never.
CREATE FUNCTION lineshaft.rate_free_at_1(
    p_quota text, p_key text, p_amount numeric, p_per_sec double precision, p_units numeric, p_now timestamptz
) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN p_units > p_amount THEN NULL
        WHEN lineshaft.rate_used_1(p_quota, p_key, p_per_sec, p_now) <= p_amount - p_units THEN p_now
        ELSE (
            SELECT to_timestamp((used.part + 61) * (p_per_sec / 60))
            FROM (
                SELECT part, sum(amount) OVER (ORDER BY part DESC) - amount AS later FROM lineshaft.quota_use
                WHERE quota = p_quota AND key = p_key AND part >= lineshaft.part_1(p_now, p_per_sec) - 60
            ) AS used
            WHERE used.later <= p_amount - p_units
            ORDER BY used.part
            LIMIT 1
        )
    END
$$;
COMMENT ON FUNCTION lineshaft.rate_free_at_1(text, text, numeric, double precision, numeric, timestamptz)
    IS 'When a rate has room for so many units.';

-- How many more tasks a quota admits now.
CREATE FUNCTION lineshaft.quota_room_1(
    p_quota text, p_key text, p_max_running integer, p_rate_amount numeric, p_rate_per_sec double precision, p_now timestamptz
) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT least(
        CASE WHEN p_max_running IS NOT NULL THEN p_max_running - lineshaft.slots_held_1(p_quota, p_key, p_max_running) END,
        CASE WHEN p_rate_amount IS NOT NULL THEN
            greatest(floor(p_rate_amount - lineshaft.rate_used_1(p_quota, p_key, p_rate_per_sec, p_now)), 0)::bigint
        END
    )
$$;
COMMENT ON FUNCTION lineshaft.quota_room_1(text, text, integer, numeric, double precision, timestamptz) IS 'How many more tasks a quota admits now.';

-- How many more tasks the quotas of these keys admit now; NULL: no quota limits them.
CREATE FUNCTION lineshaft.room_for_1(p_keys text[], p_now timestamptz) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT min(lineshaft.quota_room_1(quota, key, max_running, rate_amount, rate_per_sec, p_now)) FROM lineshaft.quotas_of_1(p_keys)
$$;
COMMENT ON FUNCTION lineshaft.room_for_1(text[], timestamptz) IS 'How many more tasks the quotas of these keys admit now.';

CREATE FUNCTION lineshaft.quota_of_lane_1(p_type text, p_model text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM lineshaft.quotas_of_1(lineshaft.lane_keys_1(p_type, p_model, NULL, NULL)))
$$;
COMMENT ON FUNCTION lineshaft.quota_of_lane_1(text, text) IS 'Whether a quota concerns all tasks of a lane, looked up.';

-- Whether a quota concerns all tasks of a lane, by their type or by the model that they are claimed for; `p_kinds` and `p_lanes` are
-- limits.quota_kinds and limits.quota_lanes. PostgreSQL inlines it, and calls the second function only where there are very many quotas.
CREATE FUNCTION lineshaft.lane_has_quota_1(p_kinds integer, p_lanes text[], p_type text, p_model text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT p_kinds & 3 <> 0 AND CASE
        WHEN p_lanes IS NULL THEN lineshaft.quota_of_lane_1(p_type, p_model)
        ELSE 'type:' || p_type LIKE ANY (p_lanes) OR coalesce('model:' || p_model LIKE ANY (p_lanes), false)
    END
$$;
COMMENT ON FUNCTION lineshaft.lane_has_quota_1(integer, text[], text, text) IS 'Whether a quota concerns all tasks of a lane.';

-- As best_head_1, except that quotas and accounts are left to claim_tasks: the best task that an instance may claim now, read without a lock, as its lane and generation. `p_freed` of its slots are about to become
-- free. Verdicts: `found`; `none`; `full`: it has no free slot; `due`: none, but the delay of a task has passed; `weigh`: claim_tasks must
-- decide. Reads one index entry for each lane with work if the instance takes any type, otherwise one for each lane of its types.
CREATE FUNCTION lineshaft.best_head_2(
    p_agent text, p_incarnation integer, p_types text[], p_freed integer, p_now timestamptz,
    OUT verdict text, OUT generation integer, OUT lane_id integer, OUT default_max_cost_usd numeric, OUT model text, OUT version text,
    OUT claim_ttl_sec double precision, OUT heartbeat_interval_sec double precision
) LANGUAGE plpgsql AS $$
DECLARE
    me record;
    barred text[];
    wanted text[];
    models text[];
    type text;
BEGIN
    SELECT
        instance.capabilities, instance.types, instance.models_available, limits.default_max_cost_usd,
        coalesce(instance.set_max_tasks, instance.max_concurrent_tasks) > instance.held - p_freed AS has_room,
        instance.status = 'active' AND instance.set_status IS NULL AND agent.budget_usd IS NULL AND limits.daily_budget_usd IS NULL
            AND instance.accounts = '{}' AS is_plain,
        limits.quota_kinds, limits.quota_lanes,
        EXISTS (SELECT FROM lineshaft.slowdown WHERE slowdown.until > p_now) AS is_slow,
        EXISTS (SELECT FROM lineshaft.pause) OR EXISTS (SELECT FROM lineshaft.breaker WHERE breaker.state <> 'closed') AS is_barred,
        instance.version, instance.claim_ttl_sec, instance.heartbeat_interval_sec
    INTO me
    FROM lineshaft.instance
    JOIN lineshaft.agent ON agent.id = instance.agent_id
    CROSS JOIN lineshaft.limits
    WHERE instance.agent_id = p_agent AND instance.incarnation = p_incarnation;
    verdict := 'weigh';
    IF me.is_plain IS NOT TRUE THEN
        RETURN;
    END IF;
    IF me.is_slow THEN
        PERFORM FROM lineshaft.slowdown
        WHERE slowdown.until > p_now AND (slowdown.key IN ('*', 'agent:' || p_agent) OR me.models_available = '{}' OR EXISTS (
            SELECT FROM unnest(me.models_available) AS own (model)
            WHERE slowdown.key IN ('model:' || own.model, 'provider:' || split_part(own.model, '/', 1))
        ));
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    -- Quotas of tags and agents may concern any task.
    IF me.quota_kinds & 24 <> 0 AND (
        me.quota_kinds & 16 <> 0
        OR CASE
            WHEN me.quota_lanes IS NULL THEN EXISTS (SELECT FROM lineshaft.quotas_of_1(ARRAY['agent:' || p_agent]))
            ELSE 'agent:' || p_agent LIKE ANY (me.quota_lanes)
        END
    ) THEN
        RETURN;
    END IF;
    version := me.version;
    default_max_cost_usd := me.default_max_cost_usd;
    claim_ttl_sec := me.claim_ttl_sec;
    heartbeat_interval_sec := me.heartbeat_interval_sec;
    IF NOT me.has_room THEN
        verdict := 'full';
        RETURN;
    END IF;
    barred := '{}';
    IF me.is_barred THEN
        -- Breakers of models, and those that a claim may probe, are for claim_tasks.
        PERFORM FROM lineshaft.breaker
        WHERE breaker.state <> 'closed'
          AND (
            (breaker.key LIKE 'model:%' AND (me.models_available = '{}' OR substr(breaker.key, 7) = ANY (me.models_available)))
            OR (NOT breaker.forced AND breaker.probe_task_id IS NULL AND breaker.probe_at < p_now)
          );
        IF FOUND THEN
            RETURN;
        END IF;
        barred := ARRAY(SELECT breaker.key FROM lineshaft.breaker WHERE breaker.state <> 'closed' UNION ALL SELECT pause.type FROM lineshaft.pause);
    END IF;
    wanted := coalesce(p_types, me.types);
    IF wanted IS NULL THEN
        WITH RECURSIVE head AS (
            SELECT open.no, first.*
            FROM lineshaft.generation AS open
            CROSS JOIN LATERAL (
                SELECT live.lane_id, live.rank, live.submission_no
                FROM lineshaft.task_live AS live
                WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = open.no
                  AND NOT lineshaft.is_expired_1(live.expires, live.deadline, p_now)
                ORDER BY live.lane_id, live.rank, live.submission_no
                LIMIT 1
            ) AS first
            UNION ALL
            SELECT head.no, following.*
            FROM head
            CROSS JOIN LATERAL (
                SELECT live.lane_id, live.rank, live.submission_no
                FROM lineshaft.task_live AS live
                WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = head.no AND live.lane_id > head.lane_id
                  AND NOT lineshaft.is_expired_1(live.expires, live.deadline, p_now)
                ORDER BY live.lane_id, live.rank, live.submission_no
                LIMIT 1
            ) AS following
        )
        SELECT head.no, lane.id, lane.models, lane.type
        INTO generation, lane_id, models, type
        FROM head
        -- By its id, whatever the planner thinks: each lane once.
        CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = head.lane_id OFFSET 0) AS lane
        WHERE lineshaft.suits_1(
                lane.type, lane.required_capabilities, lane.models, me.types, me.capabilities, me.models_available
            )
          AND NOT lineshaft.is_barred_1(lane.type, barred)
        ORDER BY round((head.rank - lane.boost_per_minute * lineshaft.minutes(p_now)) * 1e6), head.submission_no
        LIMIT 1;
    ELSE
        SELECT open.no, lane.id, lane.models, lane.type
        INTO generation, lane_id, models, type
        FROM lineshaft.lane
        CROSS JOIN lineshaft.generation AS open
        CROSS JOIN LATERAL (
            SELECT live.rank, live.submission_no
            FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = open.no AND live.lane_id = lane.id
              AND NOT lineshaft.is_expired_1(live.expires, live.deadline, p_now)
            ORDER BY live.rank, live.submission_no
            LIMIT 1
            OFFSET 0
        ) AS head
        WHERE lane.type = ANY (wanted)
          AND lineshaft.suits_1(
                lane.type, lane.required_capabilities, lane.models, me.types, me.capabilities, me.models_available
            )
          AND NOT lineshaft.is_barred_1(lane.type, barred)
        ORDER BY round((head.rank - lane.boost_per_minute * lineshaft.minutes(p_now)) * 1e6), head.submission_no
        LIMIT 1;
    END IF;
    IF lane_id IS NULL THEN
        PERFORM FROM lineshaft.task_live AS live
        WHERE live.status IN ('PENDING', 'RETRYING') AND live.due_at IS NOT NULL AND live.due_at <= p_now
        ORDER BY live.due_at LIMIT 1;
        verdict := CASE WHEN FOUND THEN 'due' ELSE 'none' END;
        RETURN;
    END IF;
    -- Where a model that the agent has is held back, this function doesn't decide.
    model := lineshaft.chosen_model_1(models, me.models_available, '{}');
    IF lineshaft.lane_has_quota_1(me.quota_kinds, me.quota_lanes, type, model) THEN
        RETURN;
    END IF;
    verdict := 'found';
END $$;

-- As complete_and_claim_2. Tasks whose claim holds slots, and tasks that quotas, fair shares, several locks or accounts concern, are left to the
-- statements for batches.
--
-- Completes the task `p_id`, with what waits for it, and with `p_next` claims the next one for the instance that held it. Without `p_id` it only
-- claims, for the instance `p_incarnation` of `p_agent`.
--
-- `completed` is false where nothing was done because complete_tasks must decide, and then nothing is claimed. The error LS001 means the same,
-- noticed too late: everything is rolled back. `verdict` is `claimed`, or as in best_head_2; `missed` if another transaction holds the task
-- that was found.
--
-- Rows are locked in the order of all transitions: tasks by id, instance, agent, DAG, the day. The task that is claimed is out of this order,
-- but never waited for.
CREATE FUNCTION lineshaft.complete_and_claim_3(
    p_id text, p_epoch integer, p_output jsonb, p_artifacts jsonb, p_report jsonb, p_output_type text, p_cost numeric, p_tokens_in bigint,
    p_tokens_out bigint, p_next boolean, p_agent text, p_incarnation integer, p_types text[], p_start boolean, p_now timestamptz,
    OUT completed boolean, OUT verdict text,
    OUT id text, OUT epoch integer, OUT live_dag_id text, OUT lock_key text, OUT model text, OUT attempts smallint, OUT rate_limits smallint,
    OUT cost_usd numeric, OUT limit_sec real, OUT heartbeat_interval_sec double precision, OUT resume boolean, OUT type text, OUT title text,
    OUT spec jsonb, OUT inputs jsonb, OUT dag_id text, OUT parent_id text, OUT deadline timestamptz, OUT max_attempts smallint, OUT max_cost_usd numeric,
    OUT require_decision_report boolean, OUT outdated boolean, OUT now timestamptz, OUT claim_ttl_sec double precision
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    done lineshaft.task_live;
    dependents text[] := '{}';
    dependent text;
    actual numeric := 0;
    own_agent text := p_agent;
    own_incarnation integer := p_incarnation;
    best record;
    following record;
    waiting record;
    dag record;
    has_slot boolean := false;
    reserved numeric := 0;
    charged numeric;
    -- Events in the order of causes.
    kinds text[] := '{}'; task_ids text[] := '{}'; dag_ids text[] := '{}'; agent_ids text[] := '{}'; epochs integer[] := '{}';
    woken integer[] := '{}';
BEGIN
    IF current_setting('transaction_read_only')::boolean THEN
        PERFORM lineshaft.is_writable_1();
    END IF;
    -- Not now(), when the transaction began: what this sees may have happened since.
    now := coalesce(p_now, clock_timestamp());
    verdict := 'none';
    IF p_id IS NOT NULL THEN
        completed := false;
        dependents := ARRAY(SELECT edge.task_id FROM lineshaft.edge WHERE edge.depends_on = p_id AND NOT edge.satisfied);
        IF cardinality(dependents) > 50 THEN
            -- One statement for all of them costs less than a loop.
            RETURN;
        END IF;
        IF dependents <> '{}' THEN
            PERFORM FROM lineshaft.task_live AS live WHERE live.id = ANY (dependents || p_id) ORDER BY live.id FOR UPDATE;
        END IF;
        DELETE FROM lineshaft.task_live AS live
        WHERE live.id = p_id AND live.epoch = p_epoch AND live.status = 'RUNNING' AND NOT live.is_gated AND live.lock_key IS NULL
          AND NOT live.has_slots AND live.account IS NULL
          AND lineshaft.within_limit_1(
            greatest(p_cost, live.attempt_cost_usd),
            lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd)
          )
          -- A DAG with a dead letter or a cancelled task may end with this one, and one with a budget may have tasks that wait for the money.
          AND (live.dag_id IS NULL OR (
            SELECT dag.dead_lettered + dag.cancelled = 0 AND (dag.budget_ceiling_usd IS NULL OR live.reserved_usd = 0) FROM lineshaft.dag WHERE dag.id = live.dag_id
          ))
          AND NOT EXISTS (
            SELECT FROM lineshaft.breaker
            WHERE (breaker.state <> 'closed' OR breaker.failures > 0)
              AND breaker.key IN ('model:' || live.model, (SELECT lane.type FROM lineshaft.lane WHERE lane.id = live.lane_id))
          )
        RETURNING live.* INTO done;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        completed := true;
        own_agent := done.agent_id;
        own_incarnation := done.incarnation;
        actual := greatest(p_cost, done.attempt_cost_usd);
        INSERT INTO lineshaft.task_end (
            id, status, epoch, ended_at, ready_at, claimed_at, started_at, first_started_at, attempts, revivals, agent_id, incarnation, model,
            version, cost_usd, tokens_input, tokens_output, output, artifacts, decision_report, output_type
        ) VALUES (
            done.id, 'COMPLETED', done.epoch, now, done.ready_at, done.claimed_at, done.started_at, done.first_started_at, done.attempts,
            done.revivals, done.agent_id, done.incarnation, done.model, done.version, done.cost_usd + actual,
            done.tokens_input + greatest(p_tokens_in, done.attempt_tokens_input),
            done.tokens_output + greatest(p_tokens_out, done.attempt_tokens_output), p_output, p_artifacts, p_report, p_output_type
        );
        kinds := kinds || '{task.validating,task.completed}'::text;
        task_ids := task_ids || done.id;
        dag_ids := dag_ids || done.dag_id;
        agent_ids := agent_ids || done.agent_id;
        epochs := epochs || done.epoch;
        -- This statement sees edges that were added while the task's row was waited for; a task without a DAG is marked then.
        IF dependents <> '{}' OR done.dag_id IS NOT NULL OR done.awaited THEN
            FOR dependent IN
                UPDATE lineshaft.edge SET satisfied = true WHERE edge.depends_on = p_id AND NOT edge.satisfied RETURNING edge.task_id
            LOOP
                IF dependent <> ALL (dependents) THEN
                    -- Its row isn't locked, and must not be locked out of order.
                    RAISE EXCEPTION 'a dependent was added' USING ERRCODE = 'LS001';
                END IF;
                UPDATE lineshaft.task_live AS live
                SET blocked = live.blocked - 1,
                    status = CASE
                        WHEN live.status = 'PENDING' AND live.blocked = 1 AND coalesce(live.due_at <= now, true) THEN 'READY' ELSE live.status
                    END::lineshaft.task_status,
                    due_at = CASE WHEN live.due_at > now THEN live.due_at END,
                    ready_at = CASE
                        WHEN live.blocked = 1 AND coalesce(live.due_at <= now, true) THEN coalesce(live.ready_at, now) ELSE live.ready_at
                    END,
                    rank = lineshaft.rank(
                        live.priority, live.downstream, lane.boost_per_minute, coalesce(live.ready_at, now), live.deadline, now
                    ),
                    rekey_at = coalesce(lineshaft.rekey_at(live.deadline, now), live.rekey_at),
                    generation = (SELECT last_value FROM lineshaft.generation_no)
                FROM lineshaft.lane
                WHERE live.id = dependent AND lane.id = live.lane_id
                RETURNING live.id, live.dag_id, live.lane_id, live.status, live.is_batch AND live.blocked = 0 AS ends INTO waiting;
                IF waiting.ends THEN
                    RAISE EXCEPTION 'a batch ends' USING ERRCODE = 'LS001';
                END IF;
                IF waiting.status = 'READY' THEN
                    kinds := kinds || '{task.ready}'::text;
                    task_ids := task_ids || waiting.id;
                    dag_ids := dag_ids || waiting.dag_id;
                    agent_ids := agent_ids || NULL::text;
                    epochs := epochs || NULL::integer;
                    woken := woken || waiting.lane_id;
                END IF;
            END LOOP;
        END IF;
    END IF;

    IF p_id IS NULL OR p_next THEN
        best := lineshaft.best_head_2(own_agent, own_incarnation, p_types, CASE WHEN completed THEN 1 ELSE 0 END, now);
        verdict := best.verdict;
        claim_ttl_sec := best.claim_ttl_sec;
        IF verdict = 'found' THEN
            -- The instance before the task: a claim that waits here keeps no task from others.
            UPDATE lineshaft.instance
            SET held = instance.held + CASE WHEN completed THEN 0 ELSE 1 END, busy_since = coalesce(instance.busy_since, now),
                last_heartbeat = now, silence_reported = false
            WHERE instance.agent_id = own_agent AND instance.incarnation = own_incarnation AND instance.status = 'active'
              AND instance.set_status IS NULL
              AND coalesce(instance.set_max_tasks, instance.max_concurrent_tasks) > instance.held - CASE WHEN completed THEN 1 ELSE 0 END;
            has_slot := FOUND;
            verdict := 'weigh';
        END IF;
        IF has_slot THEN
            SELECT live.id, live.dag_id, live.lane_id, live.lock_key, live.admission, live.first_started_at IS NOT NULL AS resume,
                lineshaft.reservation_2(
                    lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd), best.default_max_cost_usd
                ) AS cost
            INTO following
            FROM lineshaft.task_live AS live
            WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = best.generation AND live.lane_id = best.lane_id
              AND NOT lineshaft.is_expired_1(live.expires, live.deadline, now)
            ORDER BY live.rank, live.submission_no
            LIMIT 1
            FOR NO KEY UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                verdict := 'missed';
            ELSIF following.admission IS NOT NULL THEN
                NULL;
            ELSIF following.lock_key IS NULL AND following.dag_id IS NULL THEN
                verdict := 'claimed';
            ELSIF following.lock_key IS NULL THEN
                SELECT dag.status = 'running' AS is_running, dag.budget_ceiling_usd INTO dag FROM lineshaft.dag WHERE dag.id = following.dag_id;
                -- After a completion only its own DAG may be changed: two would have to be locked in the order of their ids.
                IF FOUND AND dag.budget_ceiling_usd IS NULL
                    AND (p_id IS NULL OR (dag.is_running AND (following.dag_id = done.dag_id OR following.cost = 0))) THEN
                    verdict := 'claimed';
                END IF;
            END IF;
        END IF;
        IF verdict = 'claimed' THEN
            UPDATE lineshaft.task_live AS live
            SET status = CASE WHEN p_start THEN 'RUNNING' ELSE 'CLAIMED' END::lineshaft.task_status,
                epoch = live.epoch + 1, agent_id = own_agent, incarnation = own_incarnation, model = best.model, version = best.version,
                budget_reported = false, reserved_usd = following.cost, claimed_at = now, heartbeat_at = now,
                started_at = CASE WHEN p_start THEN now END,
                first_started_at = CASE WHEN p_start THEN coalesce(live.first_started_at, now) ELSE live.first_started_at END,
                limit_at = CASE WHEN p_start THEN now + live.limit_sec * interval '1 second' END,
                lease_until = coalesce(p_now, clock_timestamp()) + interval '1 second' * CASE
                    WHEN p_start THEN least(3 * coalesce(live.heartbeat_sec, best.heartbeat_interval_sec), live.limit_sec)
                    ELSE best.claim_ttl_sec
                END
            WHERE live.id = following.id
            RETURNING live.id, live.epoch, live.dag_id, live.model, live.attempts, live.rate_limits, live.cost_usd, live.limit_sec,
                coalesce(live.heartbeat_sec, best.heartbeat_interval_sec)
            INTO id, epoch, live_dag_id, model, attempts, rate_limits, cost_usd, limit_sec, heartbeat_interval_sec;
            resume := following.resume;
            reserved := following.cost;
        END IF;
    END IF;

    IF verdict <> 'claimed' AND (completed OR has_slot) THEN
        UPDATE lineshaft.instance
        SET held = instance.held - 1,
            busy_sec = instance.busy_sec + CASE
                WHEN instance.held = 1 THEN greatest(extract(epoch FROM now - instance.busy_since)::double precision, 0) ELSE 0
            END,
            busy_since = CASE WHEN instance.held > 1 THEN instance.busy_since END
        WHERE instance.agent_id = own_agent AND instance.incarnation = own_incarnation;
    END IF;
    IF completed THEN
        charged := actual - lineshaft.booked_1(done.attempt_cost_usd, done.reserved_usd, done.agent_reserved);
        IF charged > 0 OR (done.agent_reserved AND done.reserved_usd > 0) THEN
            UPDATE lineshaft.agent
            SET reserved_usd = agent.reserved_usd - lineshaft.reserved_1(done.reserved_usd, done.agent_reserved),
                spent_usd = agent.spent_usd + charged
            WHERE agent.id = done.agent_id;
        END IF;
        IF done.dag_id IS NOT NULL THEN
            UPDATE lineshaft.dag
            SET completed = dag.completed + 1,
                reserved_usd = dag.reserved_usd - done.reserved_usd + CASE WHEN live_dag_id = done.dag_id THEN reserved ELSE 0 END,
                spent_usd = dag.spent_usd + actual - lineshaft.booked_1(done.attempt_cost_usd, done.reserved_usd, true),
                status = CASE WHEN dag.completed + 1 + dag.cancelled = dag.total THEN 'completed' ELSE dag.status END::lineshaft.dag_status,
                ended_at = CASE WHEN dag.completed + 1 + dag.cancelled = dag.total THEN now ELSE dag.ended_at END
            WHERE dag.id = done.dag_id
            RETURNING dag.status, dag.dead_lettered + dag.cancelled AS failed, dag.budget_ceiling_usd INTO dag;
            IF dag.failed > 0 OR (dag.budget_ceiling_usd IS NOT NULL AND (done.reserved_usd > 0 OR live_dag_id = done.dag_id)) THEN
                RAISE EXCEPTION 'the DAG changed' USING ERRCODE = 'LS001';
            END IF;
            IF dag.status = 'completed' THEN
                -- After the task, before what it made READY, which is in other DAGs.
                kinds := kinds[1:1] || '{dag.completed}'::text || kinds[2:];
                task_ids := task_ids[1:1] || NULL::text || task_ids[2:];
                dag_ids := dag_ids[1:1] || done.dag_id || dag_ids[2:];
                agent_ids := agent_ids[1:1] || NULL::text || agent_ids[2:];
                epochs := epochs[1:1] || NULL::integer || epochs[2:];
            END IF;
        END IF;
        IF done.day_reserved AND done.reserved_usd > 0 THEN
            UPDATE lineshaft.limits SET reserved_usd = limits.reserved_usd - done.reserved_usd;
        END IF;
        charged := actual - lineshaft.booked_1(done.attempt_cost_usd, done.reserved_usd, done.day_reserved);
        IF charged > 0 THEN
            INSERT INTO lineshaft.spend AS today (day, spent_usd) VALUES ((now AT TIME ZONE 'UTC')::date, charged)
            ON CONFLICT (day) DO UPDATE SET spent_usd = today.spent_usd + excluded.spent_usd;
        END IF;
    END IF;

    IF verdict = 'claimed' THEN
        kinds := kinds || CASE WHEN p_start THEN '{task.claimed,task.started}' ELSE '{task.claimed}' END;
        task_ids := task_ids || id;
        dag_ids := dag_ids || live_dag_id;
        agent_ids := agent_ids || own_agent;
        epochs := epochs || epoch;
        IF live_dag_id IS NOT NULL AND p_id IS NULL THEN
            IF following.cost > 0 THEN
                UPDATE lineshaft.dag SET reserved_usd = dag.reserved_usd + following.cost WHERE dag.id = live_dag_id;
            END IF;
            IF NOT dag.is_running THEN
                -- Of two claims only one finds it so.
                UPDATE lineshaft.dag SET status = 'running', ended_at = NULL WHERE dag.id = live_dag_id AND dag.status <> 'running';
                dag.is_running := NOT FOUND;
            END IF;
            IF NOT dag.is_running THEN
                kinds := kinds || '{dag.running}'::text;
                task_ids := task_ids || NULL::text;
                dag_ids := dag_ids || live_dag_id;
                agent_ids := agent_ids || own_agent;
                epochs := epochs || NULL::integer;
            END IF;
        END IF;
        SELECT task.type, task.title, task.spec, task.inputs, task.dag_id, task.parent_id, task.deadline, task.max_attempts,
            task.max_cost_usd, task.require_decision_report,
            task.open_limits IS DISTINCT FROM 0
            AND coalesce((SELECT kind.revision IS DISTINCT FROM task.type_revision FROM lineshaft.task_type AS kind WHERE kind.type = task.type), false)
        INTO type, title, spec, inputs, dag_id, parent_id, deadline, max_attempts, max_cost_usd, require_decision_report, outdated
        FROM lineshaft.task WHERE task.id = following.id;
        -- The task that was just taken needs no notification.
        IF cardinality(woken) = 1 AND following.id = ANY (task_ids[1:cardinality(task_ids) - 1]) THEN
            woken := '{}';
        END IF;
    END IF;
    IF kinds <> '{}' THEN
        INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch)
        SELECT now, logged.kinds::text[], logged.task_id, logged.dag_id, logged.agent_id, logged.epoch
        FROM unnest(kinds, task_ids, dag_ids, agent_ids, epochs) AS logged (kinds, task_id, dag_id, agent_id, epoch);
    END IF;
    IF woken <> '{}' THEN
        PERFORM pg_notify(
            lineshaft.channel(), CASE WHEN cardinality(woken) < 700 THEN array_to_string(ARRAY(SELECT DISTINCT unnest(woken)), ',') ELSE '*' END
        );
    END IF;
END $$;

-- For people: the quotas of these keys that have no room, each with its limit, what is used, who holds it (up to a hundred) and, where its rate
-- is the reason, when there is room. NULL: all have room.
CREATE FUNCTION lineshaft.full_quotas_1(p_keys text[], p_now timestamptz) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_agg(jsonb_build_object(
        'quota', limiting.quota, 'key', coalesce(nullif(limiting.key, ''), (SELECT match FROM lineshaft.quota WHERE name = limiting.quota)),
        'limit', CASE WHEN counted.held >= limiting.max_running THEN limiting.max_running ELSE limiting.rate_amount END,
        'used', CASE WHEN counted.held >= limiting.max_running THEN counted.held
            ELSE lineshaft.rate_used_1(limiting.quota, limiting.key, limiting.rate_per_sec, p_now) END,
        'holders', ARRAY(
            SELECT slot.task_id FROM lineshaft.slot
            JOIN lineshaft.task_live AS holder
                ON holder.id = slot.task_id AND holder.epoch = slot.epoch AND holder.lease_until IS NOT NULL
            WHERE slot.quota = limiting.quota AND slot.key = limiting.key
            ORDER BY slot.taken_at, slot.task_id
            LIMIT 100
        ),
        'free_at', CASE WHEN (counted.held >= limiting.max_running) IS NOT TRUE THEN lineshaft.iso(
            lineshaft.rate_free_at_1(limiting.quota, limiting.key, limiting.rate_amount, limiting.rate_per_sec, 1, p_now)
        ) END
    ) ORDER BY limiting.quota, limiting.key)
    FROM lineshaft.quotas_of_1(p_keys) AS limiting
    CROSS JOIN LATERAL (SELECT lineshaft.slots_held_1(limiting.quota, limiting.key, NULL) AS held OFFSET 0) AS counted
    WHERE lineshaft.quota_room_1(
        limiting.quota, limiting.key, limiting.max_running, limiting.rate_amount, limiting.rate_per_sec, p_now
    ) <= 0
$$;
COMMENT ON FUNCTION lineshaft.full_quotas_1(text[], timestamptz) IS 'The quotas of these keys that have no room.';

-- Decides which of these tasks, best first, a claim may take: those whose quotas all have room. The answer has an object for each task that a
-- quota concerns: `names` of what its quotas count, and `refused` if one has no room. Refused tasks are parked where a key of the task is the
-- reason, and so are up to `p_ahead` READY tasks after them in their lanes, so that claims don't meet those one by one; the names that tasks
-- were parked for are at the empty id.
--
-- Claims that count the same take turns by advisory locks, taken in one order and held until they commit. Each statement of this function
-- has a newer snapshot than those locks: no two claims count the same. Only claims take these locks, and only after those of their tasks.
CREATE FUNCTION lineshaft.admit_1(
    p_kinds integer, p_ids text[], p_types text[], p_models text[], p_accounts text[], p_agent text, p_ahead integer, p_now timestamptz
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    task_nos bigint[];
    task_names text[];
    parking boolean[];
    names text[];
    places integer[];
    rooms bigint[];
    verdict_ids text[] := '{}';
    verdicts jsonb[] := '{}';
    refused_ids text[];
    parked_ids text[] := '{}';
    parked_names text[] := '{}';
    cause text;
    is_refused boolean;
    first integer;
    j integer := 1;
BEGIN
    SELECT array_agg(need.no ORDER BY need.no, need.name), array_agg(need.name ORDER BY need.no, need.name),
        array_agg(need.parks ORDER BY need.no, need.name)
    INTO task_nos, task_names, parking
    FROM (
        SELECT asking.no, limiting.parks, lineshaft.quota_name_1(limiting.quota, limiting.key) AS name
        FROM unnest(p_ids, p_types, p_models, p_accounts) WITH ORDINALITY AS asking (id, type, model, account, no)
        CROSS JOIN LATERAL (SELECT live.admission FROM lineshaft.task_live AS live WHERE live.id = asking.id OFFSET 0) AS live
        CROSS JOIN LATERAL lineshaft.quotas_of_1(
            lineshaft.lane_keys_1(asking.type, asking.model, asking.account, p_agent) || lineshaft.parking_keys_1(
                live.admission, CASE WHEN p_kinds & 16 <> 0 THEN (SELECT task.tags FROM lineshaft.task WHERE task.id = asking.id) END
            )
        ) AS limiting
    ) AS need;
    IF task_nos IS NULL THEN
        RETURN NULL;
    END IF;
    names := ARRAY(SELECT DISTINCT name FROM unnest(task_names) AS name);
    places := ARRAY(SELECT array_position(names, name) FROM unnest(task_names) WITH ORDINALITY AS need (name, no) ORDER BY no);
    -- In the order of the locks themselves: two names may have the same.
    PERFORM pg_advisory_xact_lock(wanted.lock)
    FROM (
        SELECT DISTINCT hashtextextended('lineshaft.quota ' || name, 0) AS lock FROM unnest(names) AS name ORDER BY 1 OFFSET 0
    ) AS wanted;
    rooms := ARRAY(
        SELECT (
            SELECT lineshaft.quota_room_1(
                quota.name, substr(counted.name, strpos(counted.name, chr(31)) + 1), quota.max_running,
                CASE WHEN quota.rate_unit = 'tasks' THEN quota.rate_amount END, quota.rate_per_sec, p_now
            )
            FROM lineshaft.quota WHERE quota.name = split_part(counted.name, chr(31), 1)
        )
        FROM unnest(names) WITH ORDINALITY AS counted (name, no) ORDER BY counted.no
    );
    FOR i IN 1..cardinality(p_ids) LOOP
        first := j;
        cause := NULL;
        is_refused := false;
        WHILE j <= cardinality(task_nos) AND task_nos[j] = i LOOP
            IF rooms[places[j]] <= 0 THEN
                is_refused := true;
                IF parking[j] THEN
                    cause := coalesce(cause, task_names[j]);
                END IF;
            END IF;
            j := j + 1;
        END LOOP;
        CONTINUE WHEN j = first;
        verdict_ids := verdict_ids || p_ids[i];
        verdicts := verdicts || jsonb_build_object('names', task_names[first:j - 1], 'refused', is_refused);
        IF NOT is_refused THEN
            FOR k IN first..j - 1 LOOP
                rooms[places[k]] := rooms[places[k]] - 1;
            END LOOP;
        ELSIF cause IS NOT NULL THEN
            parked_ids := parked_ids || p_ids[i];
            parked_names := parked_names || cause;
        END IF;
    END LOOP;
    refused_ids := parked_ids;
    IF p_ahead > 0 AND refused_ids <> '{}' THEN
        -- The room is read without locks: whoever parks looks again after the commit.
        WITH ahead AS MATERIALIZED (
            SELECT next.id, next.keys
            FROM (SELECT DISTINCT lane_id, generation FROM lineshaft.task_live WHERE id = ANY (refused_ids)) AS lane
            CROSS JOIN LATERAL (
                SELECT live.id, lineshaft.parking_keys_1(
                    live.admission, CASE WHEN p_kinds & 16 <> 0 THEN (SELECT task.tags FROM lineshaft.task WHERE task.id = live.id) END
                ) AS keys
                FROM lineshaft.task_live AS live
                WHERE live.status = 'READY' AND live.parked IS NULL AND live.generation = lane.generation AND live.lane_id = lane.lane_id
                ORDER BY live.rank, live.submission_no
                LIMIT p_ahead
                OFFSET 0
            ) AS next
            WHERE next.id <> ALL (p_ids)
        ),
        -- By their keys, of which many tasks may have the same.
        blocked AS MATERIALIZED (
            SELECT jsonb_object_agg(wanted.keys::text, full_one.name) AS names
            FROM (SELECT DISTINCT keys FROM ahead WHERE keys <> '{}') AS wanted
            CROSS JOIN LATERAL (
                SELECT lineshaft.quota_name_1(quota, key) AS name FROM lineshaft.quotas_of_1(wanted.keys)
                WHERE lineshaft.quota_room_1(quota, key, max_running, rate_amount, rate_per_sec, p_now) <= 0
                ORDER BY 1
                LIMIT 1
            ) AS full_one
        )
        SELECT parked_ids || coalesce(array_agg(rival.id), '{}'), parked_names || coalesce(array_agg(rival.name), '{}')
        INTO parked_ids, parked_names
        FROM (
            SELECT live.id, blocked.names ->> ahead.keys::text AS name
            FROM ahead
            CROSS JOIN blocked
            CROSS JOIN LATERAL (
                SELECT id FROM lineshaft.task_live WHERE id = ahead.id AND status = 'READY' AND parked IS NULL FOR NO KEY UPDATE SKIP LOCKED
            ) AS live
            WHERE blocked.names ? ahead.keys::text
        ) AS rival;
    END IF;
    IF parked_ids <> '{}' THEN
        UPDATE lineshaft.task_live AS live
        SET parked = 'quota', parked_key = waiting.name
        FROM unnest(parked_ids, parked_names) AS waiting (id, name)
        WHERE live.id = waiting.id AND live.parked IS NULL;
        INSERT INTO lineshaft.quota_wake AS known (quota, key, at)
        SELECT waiting.quota, waiting.key, lineshaft.quota_wake_at_1(rule, waiting.key, p_now)
        FROM (
            SELECT DISTINCT split_part(name, chr(31), 1) AS quota, substr(name, strpos(name, chr(31)) + 1) AS key FROM unnest(parked_names) AS name
        ) AS waiting
        JOIN lineshaft.quota AS rule ON rule.name = waiting.quota
        ORDER BY 1, 2
        ON CONFLICT (quota, key) DO UPDATE SET at = least(known.at, excluded.at);
        verdict_ids := verdict_ids || ''::text;
        verdicts := verdicts || jsonb_build_object('names', ARRAY(SELECT DISTINCT unnest(parked_names)));
    END IF;
    RETURN (SELECT jsonb_object_agg(id, verdict) FROM unnest(verdict_ids, verdicts) AS told (id, verdict));
END $$;
COMMENT ON FUNCTION lineshaft.admit_1(integer, text[], text[], text[], text[], text, integer, timestamptz)
    IS 'Decides which tasks a claim may take, by their quotas, and parks the others.';

-- Slots and the use of rates for tasks that were just claimed, by a claim that has asked admit_1 and still has its locks.
CREATE FUNCTION lineshaft.take_slots_1(p_ids text[], p_epochs integer[], p_answer jsonb, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    quotas text[];
    keys text[];
BEGIN
    INSERT INTO lineshaft.slot (taken_at, epoch, quota, key, task_id)
    SELECT p_now, claimed.epoch, quota.name, substr(counted.name, strpos(counted.name, chr(31)) + 1), claimed.id
    FROM unnest(p_ids, p_epochs) AS claimed (id, epoch)
    CROSS JOIN LATERAL jsonb_array_elements_text(p_answer -> claimed.id -> 'names') AS counted (name)
    JOIN lineshaft.quota ON quota.name = split_part(counted.name, chr(31), 1)
    WHERE quota.max_running IS NOT NULL
    ON CONFLICT (quota, key, task_id) DO UPDATE SET epoch = excluded.epoch, taken_at = excluded.taken_at;
    WITH used AS MATERIALIZED (
        SELECT quota.name AS quota, substr(counted.name, strpos(counted.name, chr(31)) + 1) AS key,
            lineshaft.part_1(p_now, quota.rate_per_sec) AS part, count(*) AS n
        FROM unnest(p_ids) AS claimed (id)
        CROSS JOIN LATERAL jsonb_array_elements_text(p_answer -> claimed.id -> 'names') AS counted (name)
        JOIN lineshaft.quota ON quota.name = split_part(counted.name, chr(31), 1)
        WHERE quota.rate_unit = 'tasks'
        GROUP BY quota.name, 2
    ),
    old AS (
        DELETE FROM lineshaft.quota_use AS known USING used
        WHERE known.quota = used.quota AND known.key = used.key AND known.part < used.part - 60
    ),
    booked AS (
        INSERT INTO lineshaft.quota_use AS known (quota, key, part, amount) SELECT quota, key, part, n FROM used ORDER BY quota, key
        ON CONFLICT (quota, key, part) DO UPDATE SET amount = known.amount + excluded.amount
    )
    SELECT array_agg(quota), array_agg(key) INTO quotas, keys FROM used;
    IF quotas IS NOT NULL THEN
        -- Whoever finds it used up is woken when there is room again.
        INSERT INTO lineshaft.quota_wake AS known (quota, key, at)
        SELECT used.quota, used.key, lineshaft.quota_wake_at_1(rule, used.key, p_now)
        FROM unnest(quotas, keys) AS used (quota, key)
        JOIN lineshaft.quota AS rule ON rule.name = used.quota
        WHERE lineshaft.rate_used_1(used.quota, used.key, rule.rate_per_sec, p_now) > rule.rate_amount - 1
        ORDER BY 1, 2
        ON CONFLICT (quota, key) DO UPDATE SET at = least(known.at, excluded.at);
    END IF;
END $$;
COMMENT ON FUNCTION lineshaft.take_slots_1(text[], integer[], jsonb, timestamptz) IS 'Slots and the use of rates for tasks that were just claimed.';

-- When to look at what a quota counts for a key again, if nobody else does: when its rate has room, and otherwise after half a minute.
CREATE FUNCTION lineshaft.quota_wake_at_1(p_quota lineshaft.quota, p_key text, p_now timestamptz) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce(CASE WHEN wait.until > p_now THEN wait.until END, p_now + interval '30 seconds')
    FROM (
        SELECT CASE WHEN p_quota.rate_unit = 'tasks' THEN
            lineshaft.rate_free_at_1(p_quota.name, p_key, p_quota.rate_amount, p_quota.rate_per_sec, 1, p_now)
        END AS until
    ) AS wait
$$;
COMMENT ON FUNCTION lineshaft.quota_wake_at_1(lineshaft.quota, text, timestamptz) IS 'When to look at what a quota counts for a key again.';

-- Looks at what quotas count for keys, after a commit that released slots, or parked tasks for these names: a slot that is free by now must not
-- wait for tasks that wait for it. Also for the tasks `p_ids`, whose slots don't count any more, or which left the queue. Slots that don't count
-- are deleted; the best waiting tasks of each lane, as many as there is room for, can be claimed again; agents are woken. `p_is_due`: it is
-- time to look, whether or not a slot was released.
--
-- Either this sees a task that a claim has parked, or that claim's own look, which follows its commit, sees the free slot. It waits for no
-- row: a waiting task that is locked is changed by somebody who looks afterwards.
CREATE FUNCTION lineshaft.look_at_quotas_1(p_names text[], p_ids text[], p_is_due boolean, p_now timestamptz) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    kinds integer := (SELECT quota_kinds FROM lineshaft.limits);
    counted record;
    held bigint;
    dead_ids text[];
    dead_epochs integer[];
    room bigint;
    lanes integer[];
    moved integer := 0;
    n integer;
BEGIN
    FOR counted IN
        SELECT DISTINCT ON (wanted.name) wanted.name, wanted.quota, wanted.key, rule,
            -- Whether it still limits this key.
            coalesce(
                lineshaft.gates_claims_1(rule.max_running, rule.rate_unit)
                AND CASE WHEN wanted.key = '' THEN rule.shares_limit
                    ELSE NOT rule.shares_limit AND rule.match = ANY (lineshaft.quota_patterns_1(wanted.key)) END,
                false
            ) AS limits
        FROM (
            SELECT name, split_part(name, chr(31), 1) AS quota, substr(name, strpos(name, chr(31)) + 1) AS key
            FROM unnest(
                p_names
                || ARRAY(SELECT lineshaft.quota_name_1(slot.quota, slot.key) FROM lineshaft.slot WHERE slot.task_id = ANY (p_ids))
                || ARRAY(
                    SELECT lineshaft.quota_name_1(limiting.quota, limiting.key)
                    FROM lineshaft.task
                    CROSS JOIN LATERAL lineshaft.quotas_of_1(lineshaft.parking_keys_1(task.admission, task.tags)) AS limiting
                    WHERE kinds & 48 <> 0 AND task.id = ANY (p_ids)
                )
            ) AS name
        ) AS wanted
        LEFT JOIN lineshaft.quota AS rule ON rule.name = wanted.quota
        ORDER BY wanted.name
    LOOP
        SELECT count(*) FILTER (WHERE holder.id IS NOT NULL), array_agg(slot.task_id) FILTER (WHERE holder.id IS NULL),
            array_agg(slot.epoch) FILTER (WHERE holder.id IS NULL)
        INTO held, dead_ids, dead_epochs
        FROM lineshaft.slot
        LEFT JOIN lineshaft.task_live AS holder ON holder.id = slot.task_id AND holder.epoch = slot.epoch AND holder.lease_until IS NOT NULL
        WHERE slot.quota = counted.quota AND slot.key = counted.key;
        IF dead_ids IS NOT NULL THEN
            -- The epoch, because a claim may be taking the slot again.
            DELETE FROM lineshaft.slot
            WHERE ctid = ANY (ARRAY(
                SELECT slot.ctid
                FROM unnest(dead_ids, dead_epochs) AS dead (id, epoch)
                JOIN lineshaft.slot ON slot.quota = counted.quota AND slot.key = counted.key AND slot.task_id = dead.id AND slot.epoch = dead.epoch
                FOR UPDATE OF slot SKIP LOCKED
            ));
        END IF;
        room := CASE
            WHEN NOT counted.limits THEN 1000
            ELSE least(
                (counted.rule).max_running - held,
                CASE WHEN (counted.rule).rate_unit = 'tasks' THEN floor(
                    (counted.rule).rate_amount
                    - lineshaft.rate_used_1(counted.quota, counted.key, (counted.rule).rate_per_sec, p_now)
                )::bigint END,
                1000
            )
        END;
        IF room > 0 THEN
            WITH RECURSIVE lane AS (
                (SELECT live.lane_id FROM lineshaft.task_live AS live WHERE live.parked_key = counted.name ORDER BY live.lane_id LIMIT 1)
                UNION ALL
                SELECT (
                    SELECT live.lane_id FROM lineshaft.task_live AS live
                    WHERE live.parked_key = counted.name AND live.lane_id > lane.lane_id ORDER BY live.lane_id LIMIT 1
                )
                FROM lane WHERE lane.lane_id IS NOT NULL
            ),
            freed AS (
                UPDATE lineshaft.task_live AS live
                SET parked = NULL, parked_key = NULL, generation = (SELECT last_value FROM lineshaft.generation_no)
                WHERE live.id = ANY (ARRAY(
                    SELECT best.id
                    FROM lane
                    CROSS JOIN LATERAL (
                        SELECT waiter.id FROM lineshaft.task_live AS waiter
                        WHERE waiter.parked_key = counted.name AND waiter.lane_id = lane.lane_id AND waiter.parked = 'quota'
                        ORDER BY waiter.rank, waiter.submission_no
                        LIMIT room
                        FOR NO KEY UPDATE SKIP LOCKED
                    ) AS best
                ))
                RETURNING live.lane_id
            )
            SELECT array_agg(freed.lane_id), count(*) INTO lanes, n FROM freed;
            moved := moved + n;
            IF n > 0 THEN
                PERFORM lineshaft.wake_lanes_1(lanes);
            END IF;
            -- Lanes that were closed: the slots that were there, and don't count any more, had filled it.
            IF counted.limits AND lineshaft.quota_kind_1((counted.rule).match) < 16
                AND (p_is_due OR (dead_ids IS NOT NULL AND held + cardinality(dead_ids) >= (counted.rule).max_running))
            THEN
                IF counted.key LIKE 'type:%' THEN
                    SELECT array_agg(lane.id) INTO lanes FROM lineshaft.lane WHERE lane.type = substr(counted.key, 6);
                    PERFORM lineshaft.wake_lanes_1(lanes);
                ELSE
                    PERFORM pg_notify(lineshaft.channel(), '*');
                END IF;
            END IF;
        END IF;
        IF counted.limits AND (
            EXISTS (SELECT FROM lineshaft.task_live AS live WHERE live.parked_key = counted.name)
            OR ((counted.rule).rate_unit = 'tasks' AND room <= 0)
        ) THEN
            INSERT INTO lineshaft.quota_wake AS known (quota, key, at)
            VALUES (counted.quota, counted.key, lineshaft.quota_wake_at_1(counted.rule, counted.key, p_now))
            ON CONFLICT (quota, key) DO UPDATE SET at = excluded.at WHERE p_is_due;
        ELSIF counted.limits OR NOT EXISTS (SELECT FROM lineshaft.task_live AS live WHERE live.parked_key = counted.name) THEN
            DELETE FROM lineshaft.quota_wake AS known WHERE known.quota = counted.quota AND known.key = counted.key;
        ELSIF NOT EXISTS (SELECT FROM lineshaft.quota_wake AS known WHERE known.quota = counted.quota AND known.key = counted.key) THEN
            -- It limits nothing any more, and the next thousand follow.
            INSERT INTO lineshaft.quota_wake (quota, key, at) VALUES (counted.quota, counted.key, p_now) ON CONFLICT DO NOTHING;
        END IF;
    END LOOP;
    RETURN moved;
END $$;
COMMENT ON FUNCTION lineshaft.look_at_quotas_1(text[], text[], boolean, timestamptz)
    IS 'Deletes slots that don''t count, and lets tasks be claimed that wait for quotas with room.';

-- Wakes processes that wait for work of these lanes, which may be null; see the fragment notify_lanes.
CREATE FUNCTION lineshaft.wake_lanes_1(p_lanes integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_lanes IS NULL THEN
        RETURN;
    ELSIF current_setting('lineshaft.wakeups', true) = 'redis' THEN
        PERFORM lineshaft.report_lanes_1(p_lanes);
    ELSE
        PERFORM pg_notify(lineshaft.channel(), (
            SELECT CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END
            FROM unnest(p_lanes) AS lane_id
        ));
    END IF;
END $$;
COMMENT ON FUNCTION lineshaft.wake_lanes_1(integer[]) IS 'Wakes processes that wait for work of these lanes.';

-- The look at what is due, up to a number. Returns how much that was, and how many tasks can be claimed again.
CREATE FUNCTION lineshaft.look_at_due_quotas_1(p_limit integer, p_now timestamptz, OUT looked integer, OUT moved integer)
LANGUAGE plpgsql AS $$
DECLARE
    names text[] := ARRAY(
        SELECT lineshaft.quota_name_1(quota, key) FROM lineshaft.quota_wake WHERE at <= p_now ORDER BY at LIMIT p_limit FOR UPDATE SKIP LOCKED
    );
BEGIN
    looked := cardinality(names);
    moved := lineshaft.look_at_quotas_1(names, '{}', true, p_now);
END $$;
COMMENT ON FUNCTION lineshaft.look_at_due_quotas_1(integer, timestamptz) IS 'The look at the quotas that are due.';

-- Slots for tasks that are held, match quotas with max_running, and have none: they were claimed before the quota was set. One quota, or all
-- that were set since an instant.
CREATE FUNCTION lineshaft.give_slots_1(p_quota text, p_since timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lineshaft.slot AS known (taken_at, epoch, quota, key, task_id)
    SELECT held.claimed_at, held.epoch, limiting.quota, limiting.key, held.id
    FROM lineshaft.task_live AS held
    JOIN lineshaft.lane ON lane.id = held.lane_id
    CROSS JOIN LATERAL lineshaft.quotas_of_1(
        lineshaft.lane_keys_1(lane.type, held.model, held.account, held.agent_id)
        || lineshaft.parking_keys_1(held.admission, (SELECT task.tags FROM lineshaft.task WHERE task.id = held.id))
    ) AS limiting
    JOIN lineshaft.quota ON quota.name = limiting.quota
    WHERE held.lease_until > '-infinity' AND limiting.max_running IS NOT NULL AND (quota.name = p_quota OR quota.changed_at >= p_since)
    ON CONFLICT (quota, key, task_id) DO UPDATE SET epoch = excluded.epoch, taken_at = excluded.taken_at WHERE known.epoch < excluded.epoch;
END $$;
COMMENT ON FUNCTION lineshaft.give_slots_1(text, timestamptz) IS 'Slots for tasks that were claimed before a quota was set.';

-- Ends a submission that hasn't been checked against max_waiting: it is checked, and repeated.
CREATE FUNCTION lineshaft.refuse_unchecked_1() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'quotas bound waiting tasks' USING ERRCODE = 'LS003';
END $$;
COMMENT ON FUNCTION lineshaft.refuse_unchecked_1() IS 'Ends a submission that hasn''t been checked against max_waiting.';

-- How many tasks with a key wait, up to a number: tasks that are live and not held. A key of a type: by its lanes; one of tasks: by its index;
-- a tag, and all keys of a quota that share its limit: among all live tasks.
CREATE FUNCTION lineshaft.waiting_1(p_key text, p_match text, p_most bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT count(*) FROM (
        SELECT FROM lineshaft.task_live AS live
        WHERE p_key LIKE 'type:%' AND live.status IN ('PENDING', 'READY', 'RETRYING')
          AND live.lane_id = ANY (ARRAY(SELECT lane.id FROM lineshaft.lane WHERE lane.type = substr(p_key, 6)))
        UNION ALL
        SELECT FROM lineshaft.task_live AS live
        WHERE lineshaft.quota_kind_1(p_key) = 32 AND live.admission IS NOT NULL AND live.admission -> 'keys' ? p_key
          AND live.status IN ('PENDING', 'READY', 'RETRYING')
        UNION ALL
        SELECT FROM lineshaft.task_live AS live
        JOIN lineshaft.lane ON lane.id = live.lane_id
        WHERE (p_key = '' OR p_key LIKE 'tag:%') AND live.status IN ('PENDING', 'READY', 'RETRYING')
          AND EXISTS (
            SELECT FROM unnest(
                lineshaft.lane_keys_1(lane.type, NULL, NULL, NULL)
                || lineshaft.parking_keys_1(live.admission, (SELECT task.tags FROM lineshaft.task WHERE task.id = live.id))
            ) AS own (key)
            WHERE CASE WHEN p_key = '' THEN p_match = ANY (lineshaft.quota_patterns_1(own.key)) ELSE own.key = p_key END
          )
        LIMIT p_most
    ) AS waiting
$$;
COMMENT ON FUNCTION lineshaft.waiting_1(text, text, bigint) IS 'How many tasks with a key wait, up to a number.';

-- Before new tasks are written: the quotas that bound waiting tasks and whose bound these would exceed. Each array element is a key and how many
-- of the tasks have it. Submissions of the same key take turns until they commit. `bounds`: whether there are such quotas at all.
CREATE FUNCTION lineshaft.full_queues_1(
    p_keys text[], p_counts bigint[], OUT bounds boolean, OUT quota text, OUT key text, OUT most integer, OUT waiting bigint, OUT added bigint
) LANGUAGE plpgsql AS $$
DECLARE
    bound record;
BEGIN
    bounds := EXISTS (SELECT FROM lineshaft.limits WHERE quota_kinds & 128 <> 0);
    IF NOT bounds THEN
        RETURN;
    END IF;
    -- In the order of the locks, as claims do.
    FOR bound IN
        SELECT wanted.*, hashtextextended('lineshaft.queue ' || lineshaft.quota_name_1(wanted.name, wanted.counted), 0) AS lock
        FROM (
            SELECT rule.name, rule.match, rule.max_waiting, CASE WHEN rule.shares_limit THEN '' ELSE new.key END AS counted,
                -- A task with several keys of a shared limit counts once for each: an upper bound.
                sum(new.n)::bigint AS n
            FROM unnest(p_keys, p_counts) AS new (key, n)
            CROSS JOIN LATERAL unnest(lineshaft.quota_patterns_1(new.key)) AS pattern (match)
            JOIN lineshaft.quota AS rule ON rule.match = pattern.match
            WHERE rule.max_waiting IS NOT NULL
            GROUP BY rule.name, 4
        ) AS wanted
        ORDER BY lock
    LOOP
        PERFORM pg_advisory_xact_lock(bound.lock);
        waiting := lineshaft.waiting_1(bound.counted, bound.match, bound.max_waiting + 1::bigint);
        IF waiting + bound.n > bound.max_waiting THEN
            quota := bound.name;
            key := coalesce(nullif(bound.counted, ''), bound.match);
            most := bound.max_waiting;
            added := bound.n;
            RETURN;
        END IF;
    END LOOP;
    waiting := NULL;
END $$;
COMMENT ON FUNCTION lineshaft.full_queues_1(text[], bigint[])
    IS 'A quota whose bound of waiting tasks new tasks would exceed.';
