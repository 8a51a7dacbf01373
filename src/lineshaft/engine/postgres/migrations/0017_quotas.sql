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
-- 16 tag, 32 keys of tasks.
ALTER TABLE lineshaft.limits ADD COLUMN quota_kinds integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN lineshaft.limits.quota_kinds IS 'Kinds of keys that quotas match, as a sum: 1 type, 2 model, 4 account, 8 agent, 16 tag, 32 keys of tasks.';

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

ALTER TABLE lineshaft.instance ADD COLUMN accounts text[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN lineshaft.instance.accounts IS 'Accounts with providers that it works with; a claim chooses one.';

-- The patterns that match a key: the key itself, and each of its beginnings up to a colon with an asterisk.
CREATE FUNCTION lineshaft.quota_patterns_1(p_key text) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY[p_key] || ARRAY(
        SELECT left(p_key, n) || '*' FROM generate_series(1, length(p_key)) AS n WHERE substr(p_key, n, 1) = ':'
    )
$$;
COMMENT ON FUNCTION lineshaft.quota_patterns_1(text) IS 'The patterns of quotas that match a key.';

-- Whether a quota concerns all tasks of a lane, by their type or by the model that they are claimed for. `p_kinds` is limits.quota_kinds.
CREATE FUNCTION lineshaft.lane_has_quota_1(p_kinds integer, p_type text, p_model text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT p_kinds & 3 <> 0 AND EXISTS (
        SELECT FROM lineshaft.quota
        WHERE quota.match = ANY (lineshaft.quota_patterns_1('type:' || p_type) || lineshaft.quota_patterns_1('model:' || p_model))
    )
$$;
COMMENT ON FUNCTION lineshaft.lane_has_quota_1(integer, text, text) IS 'Whether a quota concerns all tasks of a lane.';

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
        limits.quota_kinds,
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
        OR EXISTS (SELECT FROM lineshaft.quota WHERE quota.match = ANY (lineshaft.quota_patterns_1('agent:' || p_agent)))
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
    IF lineshaft.lane_has_quota_1(me.quota_kinds, type, model) THEN
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
