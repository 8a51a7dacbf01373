-- Defaults of task types: limits that agents declare for the types they serve, or that people set, and that apply to tasks which leave them
-- out. Processes of the previous version don't know them: tasks that those submit get them from the next process of this version that
-- changes or claims them.

CREATE TABLE lineshaft.type_declaration (
    declared_at timestamptz NOT NULL,
    type text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C" NOT NULL,
    version text COLLATE "C" NOT NULL,
    defaults jsonb NOT NULL,
    CONSTRAINT type_declaration_pkey PRIMARY KEY (type, agent_id, version)
);
CREATE INDEX type_declaration_of_agent ON lineshaft.type_declaration (agent_id);
COMMENT ON TABLE lineshaft.type_declaration IS 'What agents declare about the types they serve when they register.';
COMMENT ON COLUMN lineshaft.type_declaration.declared_at IS 'The first registration that declared this; later ones with the same write nothing.';
COMMENT ON COLUMN lineshaft.type_declaration.type IS 'The task type.';
COMMENT ON COLUMN lineshaft.type_declaration.agent_id IS 'The agent.';
COMMENT ON COLUMN lineshaft.type_declaration.version IS 'Of the agent''s program; empty: it declares none.';
COMMENT ON COLUMN lineshaft.type_declaration.defaults IS 'Limits of tasks, schemas and a description; what is missing isn''t declared.';

CREATE TABLE lineshaft.task_type (
    changed_at timestamptz NOT NULL,
    revision integer NOT NULL,
    type text COLLATE "C" NOT NULL,
    limits jsonb NOT NULL DEFAULT '{}',
    set_by_hand jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT task_type_pkey PRIMARY KEY (type)
);
-- The highest one says whether a process knows all of them: every submission compares it with its cache.
CREATE UNIQUE INDEX task_type_revision ON lineshaft.task_type (revision);
COMMENT ON TABLE lineshaft.task_type IS 'The limits that tasks of a type get where they leave them out.';
COMMENT ON COLUMN lineshaft.task_type.changed_at IS 'When they last changed.';
COMMENT ON COLUMN lineshaft.task_type.revision IS 'Unique, and higher than all others after each change.';
COMMENT ON COLUMN lineshaft.task_type.type IS 'The task type.';
COMMENT ON COLUMN lineshaft.task_type.limits IS 'max_cost_usd, max_attempts, max_duration_sec and retry that apply; what is missing has no default.';
COMMENT ON COLUMN lineshaft.task_type.set_by_hand IS 'What people set: it wins over all declarations.';

CREATE TABLE lineshaft.uncapped_claim (
    first_at timestamptz NOT NULL,
    agent_id text COLLATE "C" NOT NULL,
    type text COLLATE "C" NOT NULL,
    CONSTRAINT uncapped_claim_pkey PRIMARY KEY (agent_id, type)
);
COMMENT ON TABLE lineshaft.uncapped_claim IS 'Agents with a budget that claimed tasks which reserve nothing of it.';
COMMENT ON COLUMN lineshaft.uncapped_claim.first_at IS 'The first such claim, which was logged.';
COMMENT ON COLUMN lineshaft.uncapped_claim.agent_id IS 'The agent.';
COMMENT ON COLUMN lineshaft.uncapped_claim.type IS 'The type of the task.';

ALTER TABLE lineshaft.task ADD COLUMN open_limits smallint, ADD COLUMN type_revision integer;
COMMENT ON COLUMN lineshaft.task.open_limits IS 'Limits that the caller left to the type, as a sum: 1 max_cost_usd, 2 max_attempts, 4 max_duration_sec, 8 retry; NULL: the previous version submitted it.';
COMMENT ON COLUMN lineshaft.task.type_revision IS 'The revision of task_type that its open limits have; NULL: the type had none.';

CREATE FUNCTION lineshaft.refuse_stale_types_1() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'defaults of types have changed' USING ERRCODE = 'LS002';
END $$;
COMMENT ON FUNCTION lineshaft.refuse_stale_types_1() IS 'Ends a submission that was prepared with defaults of types that have changed since.';

-- As complete_and_claim_1, with the limit over all attempts, and `outdated`: the task's limits aren't those that its type has now.
--
-- Completes the task `p_id`, with what waits for it, and with `p_next` claims the next one for the instance that held it. Without `p_id` it only
-- claims, for the instance `p_incarnation` of `p_agent`.
--
-- `completed` is false where nothing was done because complete_tasks must decide, and then nothing is claimed. The error LS001 means the same,
-- noticed too late: everything is rolled back. `verdict` is `claimed`, or as in best_head_1; `missed` if another transaction holds the task
-- that was found.
--
-- Rows are locked in the order of all transitions: tasks by id, instance, agent, DAG, the day. The task that is claimed is out of this order,
-- but never waited for.
CREATE FUNCTION lineshaft.complete_and_claim_2(
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
        best := lineshaft.best_head_1(own_agent, own_incarnation, p_types, CASE WHEN completed THEN 1 ELSE 0 END, now);
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
            SELECT live.id, live.dag_id, live.lane_id, live.lock_key, live.first_started_at IS NOT NULL AS resume,
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

-- Roles that may only submit (docs/transactional-submit.md) go on doing so.
DO $$
DECLARE
    submitter regrole;
BEGIN
    FOR submitter IN
        SELECT DISTINCT granted.grantee::regrole
        FROM pg_class CROSS JOIN LATERAL aclexplode(relacl) AS granted
        WHERE pg_class.oid = 'lineshaft.task'::regclass AND granted.privilege_type = 'INSERT' AND granted.grantee <> 0
    LOOP
        EXECUTE format('GRANT SELECT ON lineshaft.task_type TO %s', submitter);
    END LOOP;
END $$;
