-- The tables of Lineshaft. docs/architecture.md explains how a task moves through them.
--
-- A task has three tables, so that what changes often stays small:
--   task       what was submitted: wide, written once
--   task_live  its state: one narrow row until the task ends
--   task_end   how it ended
-- The view `tasks` joins them for people.
--
-- There are no foreign keys between them: every statement that writes one of them writes the others in the same
-- transaction, and key checks would double the index look-ups of the hot path.
-- (migrate.py creates the schema `lineshaft`, for its own records.)

-- The eleven states of the state machine (model/states.py). CREATED and FAILED exist only inside a
-- transaction and in the history.
CREATE TYPE lineshaft.task_status AS ENUM (
    'CREATED', 'PENDING', 'READY', 'CLAIMED', 'RUNNING', 'VALIDATING',
    'COMPLETED', 'FAILED', 'RETRYING', 'DEAD_LETTERED', 'CANCELLED'
);

CREATE TYPE lineshaft.dag_status AS ENUM ('pending', 'running', 'completed', 'failed', 'cancelled');

-- 'success': an ordinary dependency, satisfied only by COMPLETED. 'ended': a parent that waits for a spawned child, satisfied by
-- any end; a cancellation doesn't cascade along it.
CREATE TYPE lineshaft.edge_kind AS ENUM ('success', 'ended');

CREATE TYPE lineshaft.breaker_state AS ENUM ('closed', 'open', 'half_open');

CREATE TYPE lineshaft.agent_status AS ENUM ('active', 'draining', 'offline');

-- First come, first served among equal ranks, independent of the submitters' clocks.
CREATE SEQUENCE lineshaft.submission_no AS bigint CACHE 1;

-- The generation that tasks get when they become READY. Read as last_value: a row that is updated would collect dead versions
-- where every claim looks, which generations exist to avoid.
CREATE SEQUENCE lineshaft.generation_no AS integer MINVALUE 1;
-- Always by setval: nextval logs ahead, so that after a crash or a failover it would be 32 numbers further.
SELECT setval('lineshaft.generation_no', 1);

-- How many submissions met a known idempotency key, for metrics. A row would make concurrent submissions wait for each other. (After a
-- crash of the server it may be up to 32 too high: nextval logs ahead.)
CREATE SEQUENCE lineshaft.duplicate_no AS bigint CACHE 1;

-- A fencing number: it grows with every grant of any lock and is never reused.
CREATE SEQUENCE lineshaft.lock_token AS bigint CACHE 1;


-- Minutes since 2026, as ranks count time (model/priority.py).
CREATE FUNCTION lineshaft.minutes(instant timestamptz) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN extract(epoch FROM instant - timestamptz '2026-01-01 00:00:00+00')::double precision / 60;

-- The order of claims inside a lane (model/priority.py: rank). One expression, inlined wherever a task becomes READY or is re-keyed; a
-- test compares it with the model.
CREATE FUNCTION lineshaft.rank(
    priority smallint, downstream smallint, boost_per_minute double precision,
    ready_at timestamptz, deadline timestamptz, now timestamptz
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN priority - least(downstream, 10) + boost_per_minute * lineshaft.minutes(ready_at)
    - CASE WHEN deadline IS NULL THEN 0
      ELSE 40 * power(2, -least(greatest(extract(epoch FROM deadline - now)::double precision / 3600, 0), 1000)) END;

-- When the deadline boost will have grown by half a point (model/priority.py: rekey_at). STABLE, like
-- adding an interval to a timestamp: declared IMMUTABLE, it would not be inlined but planned by every statement that uses it.
CREATE FUNCTION lineshaft.rekey_at(deadline timestamptz, now timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN deadline > now THEN greatest(
    now + interval '1 second',
    deadline - make_interval(secs => 3600 * greatest(log(2, (40 / (
        40 * power(2, -least(extract(epoch FROM deadline - now)::double precision / 3600, 1000)) + 0.5
    ))::numeric)::double precision, 0))
) END;

-- The channel of wake-ups. A channel belongs to the whole database, so another program may need the name; every session of the database
-- must agree on it, callers' own connections too: ALTER DATABASE … SET lineshaft.channel = '…'.
CREATE FUNCTION lineshaft.channel() RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN left(coalesce(nullif(current_setting('lineshaft.channel', true), ''), 'task_ready'), 63);

-- A time in the JSON of an event, as in all other JSON: in UTC, with a Z. jsonb_build_object would write +00:00.
CREATE FUNCTION lineshaft.iso(instant timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (to_jsonb(instant AT TIME ZONE 'UTC') #>> '{}') || 'Z';

-- What a row of events of a standalone task says about its virtual DAG, if anything: the DAG has no events of its own. A revival is
-- {task.resolved} alone; a task that was never claimed leaves its DAG pending. (Depends on nothing but the row: cursors rely on it.)
CREATE FUNCTION lineshaft.dag_kind(kinds text[], epoch integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN 'task.completed' = ANY (kinds) THEN 'dag.completed'
    WHEN 'task.created' = ANY (kinds) THEN 'dag.created'
    WHEN 'task.claimed' = ANY (kinds) THEN CASE WHEN epoch = 1 THEN 'dag.running' END
    WHEN 'task.dead_lettered' = ANY (kinds) THEN 'dag.failed'
    WHEN 'task.cancelled' = ANY (kinds) THEN 'dag.cancelled'
    WHEN kinds = '{task.resolved}' AND epoch > 0 THEN 'dag.running'
END;

-- Who may claim what, and what is reserved and settled for it: said here, and used by every claim, completion, explanation and check. The number
-- in a name is its version, as in 0002_single_tasks.sql. Each parameter that a statement passes a subquery for occurs once in its expression:
-- PostgreSQL would not inline the function otherwise.

-- Whether an instance can do the tasks of a lane: their type, their capabilities and one of their models are its own.
CREATE FUNCTION lineshaft.suits_1(
    type text, required_capabilities text[], models text[], own_types text[], own_capabilities text[], own_models text[]
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (own_types IS NULL OR type = ANY (own_types)) AND required_capabilities <@ own_capabilities
    AND (models = '{}' OR own_models = '{}' OR models && own_models);

-- Whether a task is cancelled rather than claimed: its deadline has passed, and it isn't wanted after that.
CREATE FUNCTION lineshaft.is_expired_1(expires boolean, deadline timestamptz, now timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (expires AND deadline <= now) IS TRUE;

-- Whether tasks of a type are held back. `barred` are types that are paused or have an open breaker; * is all.
CREATE FUNCTION lineshaft.is_barred_1(type text, barred text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '*' = ANY (barred) OR type = ANY (barred);

-- The first of these models that an instance has and that isn't barred, by itself or with its provider. NULL: none.
CREATE FUNCTION lineshaft.first_model_1(models text[], own_models text[], barred text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (
    SELECT wanted.model
    FROM unnest(models) WITH ORDINALITY AS wanted (model, preference)
    WHERE (own_models = '{}' OR wanted.model = ANY (own_models))
      AND NOT barred && ARRAY['model:' || wanted.model, 'provider:' || split_part(wanted.model, '/', 1)]
    ORDER BY wanted.preference
    LIMIT 1
);

-- The model of a claim: the task's first preference that can be used; without preferences the agent uses its own first. Inlined, except where
-- there is something to choose.
CREATE FUNCTION lineshaft.chosen_model_1(models text[], own_models text[], barred text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN models = '{}' AND barred = '{}' THEN own_models[1]
    WHEN models = '{}' THEN lineshaft.first_model_1(own_models[1:1], own_models, barred)
    WHEN own_models = '{}' AND barred = '{}' THEN models[1]
    ELSE lineshaft.first_model_1(models, own_models, barred)
END;

-- What a claim reserves for a task: its own limit, or the installation's default, which is not a limit on the task.
CREATE FUNCTION lineshaft.reservation_1(max_cost_usd numeric, default_max_cost_usd numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(max_cost_usd, default_max_cost_usd, 0);

-- What a ledger (the agent, the DAG, the day) must have left for a claim: the reservation, and for a task without a limit of its own at least
-- the smallest amount there is.
CREATE FUNCTION lineshaft.needed_1(max_cost_usd numeric, default_max_cost_usd numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(max_cost_usd, greatest(default_max_cost_usd, 0.000001));

-- Whether a ledger that has `money` left can pay for a claim. NULL: the ledger has no limit.
CREATE FUNCTION lineshaft.affords_1(money numeric, max_cost_usd numeric, default_max_cost_usd numeric) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (money >= lineshaft.needed_1(max_cost_usd, default_max_cost_usd)) IS NOT FALSE;

-- Whether an attempt that has cost this much is within the limit of its task; exactly the limit is.
CREATE FUNCTION lineshaft.within_limit_1(cost_usd numeric, max_cost_usd numeric) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (cost_usd <= max_cost_usd) IS NOT FALSE;

-- The part of a reservation that a ledger holds: the agent and the day hold it if they had a limit when the claim was made, a DAG always.
CREATE FUNCTION lineshaft.reserved_1(reserved_usd numeric, is_held boolean) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN is_held THEN reserved_usd ELSE 0 END;

-- What an attempt that has cost this much so far has booked in a ledger: what is above the reservation there. The end of the attempt books
-- the rest of its cost.
CREATE FUNCTION lineshaft.booked_1(attempt_cost_usd numeric, reserved_usd numeric, is_held boolean) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(attempt_cost_usd - lineshaft.reserved_1(reserved_usd, is_held), 0);


CREATE TABLE lineshaft.task (
    created_at timestamptz NOT NULL DEFAULT now(),
    deadline timestamptz,
    run_at timestamptz,
    priority_boost_per_minute double precision NOT NULL DEFAULT 0.1,
    max_duration_sec double precision NOT NULL DEFAULT 3600,
    heartbeat_interval_sec double precision,
    priority smallint NOT NULL DEFAULT 50,
    max_attempts smallint NOT NULL DEFAULT 3,
    require_decision_report boolean NOT NULL DEFAULT false,
    -- A batch has no work of its own: it ends with its children.
    is_batch boolean NOT NULL DEFAULT false,
    -- Cancelled when its deadline passes.
    expire_at_deadline boolean NOT NULL DEFAULT false,
    -- A spawned task: as a dead letter it counts as cancelled for its DAG.
    ignore_failure boolean NOT NULL DEFAULT false,
    id text COLLATE "C" NOT NULL,
    dag_id text COLLATE "C" NOT NULL,
    parent_id text COLLATE "C",
    idempotency_key text COLLATE "C",
    type text NOT NULL,
    title text NOT NULL,
    -- Defaults for retry, boost, limits and reports: factory, loki or officeplane.
    preset text NOT NULL DEFAULT 'factory',
    spec jsonb NOT NULL DEFAULT '{}',
    -- The tasks whose outputs it gets, by name: {"notes": "task_…", "sections": ["task_…", "task_…"]}; NULL: none.
    inputs jsonb,
    key text,
    required_capabilities text[] NOT NULL DEFAULT '{}',
    model_preferences text[] NOT NULL DEFAULT '{}',
    fallback_models text[] NOT NULL DEFAULT '{}',
    max_cost_usd numeric(20, 6),
    max_total_cost_usd numeric(20, 6),
    lock_key text COLLATE "C",
    -- NULL: the preset's policy.
    retry jsonb,
    output_type text,
    -- The gates that the output must pass, in order; NULL: none.
    gates jsonb,
    tags text[] NOT NULL DEFAULT '{}',
    created_by text,
    created_by_token text,
    -- What a compatible API received and must echo (the original priority, instanceId, metadata, …).
    surface jsonb,
    CONSTRAINT task_pkey PRIMARY KEY (id),
    -- Short: every statement that writes a row reads and prepares the constraint. The model checks the rest, and tests run with strict
    -- constraints (tests/strict.sql).
    CONSTRAINT possible_task CHECK (priority BETWEEN 0 AND 100 AND max_attempts > 0)
);
COMMENT ON TABLE lineshaft.task IS 'What was submitted. Written once; the state is in task_live or task_end. People read the view tasks.';

CREATE INDEX task_of_dag ON lineshaft.task (dag_id, id);
CREATE INDEX task_of_parent ON lineshaft.task (parent_id) WHERE parent_id IS NOT NULL;
-- Lists, newest first. Without the id: all tasks of one call have one time, which the index then stores once.
CREATE INDEX task_by_age ON lineshaft.task (created_at);
CREATE INDEX task_of_document ON lineshaft.task (lock_key) WHERE lock_key IS NOT NULL;
CREATE INDEX task_by_tag ON lineshaft.task USING gin (tags) WHERE tags <> '{}';


-- Generations that claims read. Claimed tasks leave dead entries at the head of the READY index, where the next claim looks, and while any
-- old transaction is open they can't be cleaned up. So the index is prefixed with a generation: once five times as many tasks have left a
-- generation as remain, the next is opened; a drained generation is removed here and never read again.
CREATE TABLE lineshaft.generation (
    no integer NOT NULL,
    -- Transactions below this may still write into its predecessor, which is closed when there are none. The largest number: not known
    -- yet.
    opened_by xid8 NOT NULL DEFAULT pg_current_xact_id(),
    opened_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT generation_pkey PRIMARY KEY (no)
);
COMMENT ON TABLE lineshaft.generation IS 'Parts of the READY index that claims read.';
INSERT INTO lineshaft.generation (no) VALUES (1);

-- Types whose tasks can't be claimed; * is all.
CREATE TABLE lineshaft.pause (
    since timestamptz NOT NULL,
    type text COLLATE "C" NOT NULL,
    -- NULL: none was given.
    reason text,
    -- NULL: unknown, or the cost-velocity stop.
    actor text,
    -- Running attempts are released, too.
    stops boolean NOT NULL DEFAULT false,
    CONSTRAINT pause_pkey PRIMARY KEY (type)
);
COMMENT ON TABLE lineshaft.pause IS 'Types that are paused, manually or by the cost-velocity stop; * is all.';


-- Interchangeable tasks: the same eligibility and the same rate of ageing (model/priority.py). Few rows. The janitor removes those that no
-- task uses (engine/lane_removal.sql).
CREATE TABLE lineshaft.lane (
    id integer GENERATED ALWAYS AS IDENTITY,
    type text NOT NULL,
    required_capabilities text[] NOT NULL,
    models text[] NOT NULL,
    boost_per_minute double precision NOT NULL,
    -- Its tasks have a max_cost_usd from this to less than twice this. NULL: none; 0: of 0.
    cost_from_usd numeric(20, 6),
    -- Set: no task used it then. A look-up empties both columns, and processes forget lanes after some minutes, so later only
    -- transactions below retired_by may still use it.
    retired_at timestamptz,
    retired_by xid8,
    CONSTRAINT lane_pkey PRIMARY KEY (id)
);
COMMENT ON TABLE lineshaft.lane IS 'Sets of tasks with the same eligibility for agents and the same rate of ageing.';
-- NULL is a value here; PostgreSQL 14 has no NULLS NOT DISTINCT. -1 is not a valid cost.
CREATE UNIQUE INDEX lane_identity ON lineshaft.lane
    (type, required_capabilities, models, boost_per_minute, (coalesce(cost_from_usd, -1)));


CREATE TABLE lineshaft.task_live (
    submission_no bigint NOT NULL DEFAULT nextval('lineshaft.submission_no'),
    -- The order of claims inside a lane; valid until rekey_at.
    rank double precision NOT NULL,
    rekey_at timestamptz,
    -- When it first became READY: its age counts from then.
    ready_at timestamptz,
    -- When the promoter makes it READY: the end of a back-off or a snooze, or the scheduled time.
    due_at timestamptz,
    claimed_at timestamptz,
    started_at timestamptz,
    first_started_at timestamptz,
    heartbeat_at timestamptz,
    -- After this the reaper ends the claim. NULL: not held.
    lease_until timestamptz,
    -- The end of the execution limit; lease_until never passes it.
    limit_at timestamptz,
    deadline timestamptz,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    lane_id integer NOT NULL,
    generation integer NOT NULL DEFAULT 0,
    -- The lease is three heartbeat intervals. NULL until it is claimed.
    heartbeat_sec real,
    -- The execution limit of one attempt.
    limit_sec real NOT NULL DEFAULT 3600,
    -- Grows with every claim: writes with an older epoch are rejected.
    epoch integer NOT NULL DEFAULT 0,
    -- The instance of agent_id that holds it.
    incarnation integer,
    -- Dependencies that are still open.
    blocked integer NOT NULL DEFAULT 0,
    attempts smallint NOT NULL DEFAULT 0,
    -- Consecutive rate limits; they use no attempts.
    rate_limits smallint NOT NULL DEFAULT 0,
    -- How often it was revived.
    revivals smallint NOT NULL DEFAULT 0,
    -- Unfinished tasks on the longest chain below, for the critical-path boost.
    downstream smallint NOT NULL DEFAULT 0,
    priority smallint NOT NULL DEFAULT 50,
    is_batch boolean NOT NULL DEFAULT false,
    -- Its output must pass a gate or have a decision report: it can't complete directly from RUNNING.
    is_gated boolean NOT NULL DEFAULT false,
    -- It is cancelled when its deadline passes.
    expires boolean NOT NULL DEFAULT false,
    -- Another task depends on this one, which has no DAG: its end must look for dependents. In a DAG it always does.
    awaited boolean NOT NULL DEFAULT false,
    -- It was reported that no agent can afford it: once, until it is claimed or there is money again.
    budget_reported boolean NOT NULL DEFAULT false,
    -- Its reservation is part of the agent's reserved money, and of the day's: they had a limit when it was claimed.
    agent_reserved boolean NOT NULL DEFAULT false,
    day_reserved boolean NOT NULL DEFAULT false,
    status lineshaft.task_status NOT NULL,
    id text COLLATE "C" NOT NULL,
    -- NULL while the DAG is virtual, that is has no row: the DAG of a standalone task.
    dag_id text COLLATE "C",
    agent_id text COLLATE "C",
    model text,
    -- Of the program that its agent runs.
    version text,
    -- Set: READY, but hidden from claims until the lock or the money is available.
    parked text,
    lock_key text COLLATE "C",
    -- The batch that holds the lock for it. NULL: the task itself.
    lock_owner text COLLATE "C",
    -- Of the grant of its lock. NULL: the claim has no lock.
    lock_token bigint,
    -- What a claim reserves. NULL: no limit of its own.
    max_cost_usd numeric(20, 6),
    reserved_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- Of earlier attempts, and of the current one so far.
    cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    attempt_cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- Of the current attempt so far; those of earlier ones are above.
    attempt_tokens_input bigint NOT NULL DEFAULT 0,
    attempt_tokens_output bigint NOT NULL DEFAULT 0,
    last_category text,
    progress jsonb,
    CONSTRAINT task_live_pkey PRIMARY KEY (id),
    -- A violation would lose a task or give it to two agents. Short, as possible_task: a check of all that each status implies took a fifth
    -- of the server's time for a single submission; it is in tests/strict.sql.
    CONSTRAINT held_or_free CHECK (
        CASE
            WHEN lease_until IS NULL THEN
                agent_id IS NULL AND CASE status
                    WHEN 'READY' THEN blocked = 0
                    WHEN 'VALIDATING' THEN true
                    ELSE (blocked > 0 OR due_at IS NOT NULL) AND status = ANY ('{PENDING,RETRYING}')
                END
            ELSE agent_id IS NOT NULL AND status = ANY ('{CLAIMED,RUNNING,VALIDATING}')
        END
    )
) WITH (
    -- Rows are updated a few times and deleted within minutes: vacuum by number of rows, not by share of the table.
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
COMMENT ON TABLE lineshaft.task_live IS 'The state of each task that has not ended. One narrow row, deleted at the end.';

-- Claims: the head of each lane, best first.
CREATE INDEX task_live_claimable ON lineshaft.task_live (generation, lane_id, rank, submission_no)
    WHERE status = 'READY' AND parked IS NULL;
-- The reaper: expired leases.
CREATE INDEX task_live_leased ON lineshaft.task_live (lease_until) WHERE lease_until IS NOT NULL;
-- The promoter: tasks that are due.
CREATE INDEX task_live_due ON lineshaft.task_live (due_at) WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL;
-- The promoter: deadline boosts that have grown.
CREATE INDEX task_live_rekey ON lineshaft.task_live (rekey_at) WHERE rekey_at IS NOT NULL;
-- Tasks that want a document lock, parked or not, best first in each lane.
CREATE INDEX task_live_wants_lock ON lineshaft.task_live (lock_key, lane_id, rank, submission_no)
    WHERE status = 'READY' AND lock_key IS NOT NULL;
-- The promoter: tasks over their DAG's budget that were not reported yet.
CREATE INDEX task_live_budget_unreported ON lineshaft.task_live (id) WHERE parked = 'dag_budget' AND NOT budget_reported;
-- Tasks over their DAG's budget, best first.
CREATE INDEX task_live_budget_waiters ON lineshaft.task_live (dag_id, rank, submission_no) WHERE parked = 'dag_budget';


CREATE TABLE lineshaft.task_end (
    ended_at timestamptz NOT NULL,
    ready_at timestamptz,
    claimed_at timestamptz,
    started_at timestamptz,
    first_started_at timestamptz,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    -- A revived task continues from here, so that no stale claim ever matches.
    epoch integer NOT NULL,
    -- The instance of agent_id that held it last.
    incarnation integer,
    attempts smallint NOT NULL DEFAULT 0,
    revivals smallint NOT NULL DEFAULT 0,
    status lineshaft.task_status NOT NULL,
    id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    model text,
    -- Of the program that its agent runs.
    version text,
    cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- Why it failed permanently, or was cancelled.
    reason text,
    category text,
    output jsonb,
    artifacts jsonb,
    decision_report jsonb,
    -- The type that was given with the output; NULL: the one of the task.
    output_type text,
    CONSTRAINT task_end_pkey PRIMARY KEY (id),
    CONSTRAINT over CHECK (status = ANY ('{COMPLETED,CANCELLED,DEAD_LETTERED}'))
);
COMMENT ON TABLE lineshaft.task_end IS 'How each task ended: its recorded outcome.';
-- Retention, throughput, and the latest ends.
CREATE INDEX task_end_by_age ON lineshaft.task_end (ended_at);
-- Bad ends; it also shows at once that no task of a live status is here, so that the view never scans the history for one.
CREATE INDEX task_end_not_completed ON lineshaft.task_end (status, ended_at) WHERE status <> 'COMPLETED';
-- Words in decision reports. ('simple' is independent of the language and the same on every server.)
CREATE INDEX task_end_report_words ON lineshaft.task_end USING gin (to_tsvector('pg_catalog.simple'::regconfig, decision_report))
    WHERE decision_report IS NOT NULL;


-- Idempotency: a key in force names its task. It expires at once when the task is cancelled or dead-lettered, and a while after the task
-- has completed if the caller gave it a window.
CREATE TABLE lineshaft.task_key (
    key text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    -- Of the submission: the same key with different content is flagged. Several hashes, concatenated, after a revival with another spec.
    content_hash bytea NOT NULL,
    -- NULL: no expiry.
    expires_at timestamptz,
    -- The window: how long the key stays in force after the task has completed. NULL: forever.
    ttl_sec double precision,
    CONSTRAINT task_key_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.task_key IS 'Idempotency keys, in force until they expire.';


CREATE TABLE lineshaft.edge (
    task_id text COLLATE "C" NOT NULL,
    depends_on text COLLATE "C" NOT NULL,
    kind lineshaft.edge_kind NOT NULL DEFAULT 'success',
    -- Counted down once, however often the upstream is revived.
    satisfied boolean NOT NULL DEFAULT false,
    CONSTRAINT edge_pkey PRIMARY KEY (task_id, depends_on),
    CONSTRAINT edge_is_no_loop CHECK (task_id <> depends_on)
) WITH (
    -- Each row is updated once, on no indexed column: with room on its page, the two wide indexes stay unchanged.
    fillfactor = 50
);
COMMENT ON TABLE lineshaft.edge IS 'Dependencies: task_id waits for depends_on.';
-- The dependents of a task that ends.
CREATE INDEX edge_dependents ON lineshaft.edge (depends_on, task_id);


-- A DAG of several tasks, or one with a budget. A standalone task's DAG is virtual: an id without a row.
CREATE TABLE lineshaft.dag (
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    -- All tasks, and those that have ended in each way; updated with every end.
    total integer NOT NULL DEFAULT 0,
    completed integer NOT NULL DEFAULT 0,
    cancelled integer NOT NULL DEFAULT 0,
    dead_lettered integer NOT NULL DEFAULT 0,
    status lineshaft.dag_status NOT NULL DEFAULT 'pending',
    id text COLLATE "C" NOT NULL,
    title text NOT NULL,
    idempotency_key text COLLATE "C",
    created_by text,
    created_by_token text,
    budget_ceiling_usd numeric(20, 6),
    reserved_usd numeric(20, 6) NOT NULL DEFAULT 0,
    spent_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- The budget was lowered below what had been spent: running attempts must stop.
    budget_cut boolean NOT NULL DEFAULT false,
    -- How many of its tasks were spawned by others.
    spawned integer NOT NULL DEFAULT 0,
    CONSTRAINT dag_pkey PRIMARY KEY (id),
    CONSTRAINT counters_fit CHECK (completed + cancelled + dead_lettered <= total AND reserved_usd >= 0)
) WITH (fillfactor = 70);
COMMENT ON TABLE lineshaft.dag IS 'DAGs of more than one task, or with a budget.';
CREATE INDEX dag_by_age ON lineshaft.dag (created_at);


-- Idempotency of whole DAGs. A key is free again once its DAG is cancelled; retention deletes it with the DAG.
CREATE TABLE lineshaft.dag_key (
    key text COLLATE "C" NOT NULL,
    dag_id text COLLATE "C" NOT NULL,
    -- The ids of its tasks by the keys of the call: a repeated call gets the same answer.
    tasks jsonb NOT NULL,
    CONSTRAINT dag_key_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.dag_key IS 'Idempotency keys of DAGs.';


-- Claims that ended without success, and outputs in validation. The successful attempt is in task_end.
CREATE TABLE lineshaft.attempt (
    claimed_at timestamptz NOT NULL,
    started_at timestamptz,
    ended_at timestamptz,
    -- Since when it waits for a gate that runs elsewhere, and when a validator may take it: at once, or when the lease of another
    -- validator expires. NULL: a person decides.
    gate_since timestamptz,
    gate_due_at timestamptz,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    epoch integer NOT NULL,
    -- How often validators have started this gate.
    gate_runs integer NOT NULL DEFAULT 0,
    -- The number of the current gate.
    gate_no smallint NOT NULL DEFAULT 0,
    -- Counts from 1 after every revival.
    number smallint NOT NULL,
    revival smallint NOT NULL DEFAULT 0,
    -- The instance of agent_id that made it.
    incarnation integer,
    task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    -- The name of the instance.
    instance text COLLATE "C",
    model text,
    -- Of the program that its agent runs.
    version text,
    outcome text NOT NULL CHECK (
        outcome IN ('validating', 'completed', 'failed', 'rate_limited', 'released', 'waiting', 'cancelled')
    ),
    category text,
    error text,
    -- The end of it, at most 16 KiB.
    traceback text,
    -- The call with the claim's token that ended it: fail, complete or release. NULL: something else, so every call is stale.
    ended_by text,
    cost_usd numeric(20, 6) NOT NULL DEFAULT 0 CHECK (cost_usd >= 0),
    -- The part of it that gates have cost; the rest is what the agent reported.
    gate_cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- {data, artifacts, decision_report}, once submitted.
    output jsonb,
    -- The method of the gate that it waits for. NULL: none; its agent still holds it.
    gate text COLLATE "C",
    -- Why the last validator reached no verdict.
    gate_error text,
    -- [{gate, method, passed, reasons, score, cost_usd, model, by, at}], one for each gate so far.
    verdicts jsonb,
    CONSTRAINT attempt_pkey PRIMARY KEY (task_id, epoch),
    CONSTRAINT over_unless_validating CHECK ((ended_at IS NULL) = (outcome = 'validating')),
    CONSTRAINT failure_has_a_cause CHECK (outcome <> 'failed' OR (category IS NOT NULL AND error IS NOT NULL))
);
COMMENT ON TABLE lineshaft.attempt IS 'Attempts that failed, were released, or are in validation.';
-- Outputs that wait for a gate: validators take them by method ...
CREATE INDEX attempt_gated ON lineshaft.attempt (gate, gate_due_at) WHERE outcome = 'validating' AND gate IS NOT NULL;
-- ... and people see what waits for them, the longest first.
CREATE INDEX attempt_to_approve ON lineshaft.attempt (gate_since, task_id) WHERE outcome = 'validating' AND gate = 'human';
-- Recent failures, and their cost.
CREATE INDEX attempt_by_age ON lineshaft.attempt (ended_at);


-- Results of durable steps, and the last checkpoint, for the next claim.
CREATE TABLE lineshaft.step (
    recorded_at timestamptz NOT NULL,
    epoch integer NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Of the arguments that it was called with. NULL: unknown, and every call matches.
    digest text COLLATE "C",
    cost_usd numeric(20, 6) NOT NULL DEFAULT 0 CHECK (cost_usd >= 0),
    data jsonb,
    CONSTRAINT step_pkey PRIMARY KEY (task_id, name)
);
COMMENT ON TABLE lineshaft.step IS 'Results of durable steps: a recorded step is not run again.';

CREATE TABLE lineshaft.checkpoint (
    recorded_at timestamptz NOT NULL,
    epoch integer NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    data jsonb,
    CONSTRAINT checkpoint_pkey PRIMARY KEY (task_id)
);
COMMENT ON TABLE lineshaft.checkpoint IS 'The last checkpoint of each task.';


-- An agent is a role: a name that has a budget and can be stopped by hand. Its processes are in `instance`. Written only where money is
-- reserved or spent: instances without money never wait for each other.
CREATE TABLE lineshaft.agent (
    registered_at timestamptz NOT NULL,
    -- Deleted by hand: not in lists until it registers again. Its money still counts.
    deleted_at timestamptz,
    -- Of the latest registration; grows with each, so that no stale process ever matches.
    incarnation integer NOT NULL,
    -- Set by hand for each instance, present and future. NULL: as each instance declares.
    set_max_tasks integer,
    -- Set by hand, draining or offline; it wins until it is cleared by hand. NULL: not set.
    set_status lineshaft.agent_status,
    id text COLLATE "C" NOT NULL,
    type text,
    -- NULL: unlimited.
    budget_usd numeric(20, 6),
    spent_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- What claims have reserved; only those made while there was a budget.
    reserved_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- The budget was lowered below what had been spent: running attempts must stop.
    budget_cut boolean NOT NULL DEFAULT false,
    CONSTRAINT agent_pkey PRIMARY KEY (id),
    CONSTRAINT possible_agent CHECK (reserved_usd >= 0)
) WITH (
    -- Updated with every claim that reserves money, on no indexed column: leave room on the page.
    fillfactor = 50
);
COMMENT ON TABLE lineshaft.agent IS 'Agents, with their budgets. Their processes are in instance.';

-- One running process of an agent, with what it can do and how much it holds.
CREATE TABLE lineshaft.instance (
    registered_at timestamptz NOT NULL,
    last_heartbeat timestamptz NOT NULL,
    poll_interval_sec double precision NOT NULL DEFAULT 5,
    claim_ttl_sec double precision NOT NULL DEFAULT 60,
    heartbeat_interval_sec double precision NOT NULL DEFAULT 30,
    -- Unique within the agent.
    incarnation integer NOT NULL,
    max_concurrent_tasks integer NOT NULL,
    -- As the agent's: copied, so that a claim finds everything that decides in the row that it locks.
    set_max_tasks integer,
    -- The number of held tasks, updated in the same transaction. Counting rows would read every dead index entry of past claims.
    held integer NOT NULL DEFAULT 0,
    -- How long it has held at least one task, up to busy_since; NULL: it holds none now.
    busy_sec double precision NOT NULL DEFAULT 0,
    busy_since timestamptz,
    -- What the process reports: offline once it has left. A process that is just gone is recognised by the age of last_heartbeat.
    status lineshaft.agent_status NOT NULL DEFAULT 'active',
    set_status lineshaft.agent_status,
    -- The offline detector has reported that it is silent: once, until its next heartbeat.
    silence_reported boolean NOT NULL DEFAULT false,
    agent_id text COLLATE "C" NOT NULL,
    -- Names the process: registering it again supersedes it. Unique within the agent, whose row a registration locks. Not by an index: a
    -- look-up by agent and incarnation might choose it.
    name text COLLATE "C" NOT NULL DEFAULT '',
    -- The machine that it runs on.
    host text COLLATE "C",
    -- Of the program that it runs, as it declares it; recorded with each attempt.
    version text,
    capabilities text[] NOT NULL DEFAULT '{}',
    -- NULL: any type that it is capable of.
    types text[],
    models_available text[] NOT NULL DEFAULT '{}',
    -- The idempotency key that it was registered with, if any.
    registration_key text COLLATE "C",
    CONSTRAINT instance_pkey PRIMARY KEY (agent_id, incarnation),
    CONSTRAINT possible_instance CHECK (held >= 0)
) WITH (
    -- Updated with every claim and heartbeat, on no indexed column: leave room on the page.
    fillfactor = 50
);
COMMENT ON TABLE lineshaft.instance IS 'Running processes of agents.';
CREATE UNIQUE INDEX instance_registration_key ON lineshaft.instance (registration_key) WHERE registration_key IS NOT NULL;

-- What was spent on each day (UTC).
CREATE TABLE lineshaft.spend (
    day date NOT NULL,
    spent_usd numeric(20, 6) NOT NULL DEFAULT 0,
    CONSTRAINT spend_pkey PRIMARY KEY (day)
) WITH (fillfactor = 50);
COMMENT ON TABLE lineshaft.spend IS 'What all tasks together cost on each day (UTC).';

-- Limits of the installation, which every process obeys. One row. A limit that is NULL isn't in force.
CREATE TABLE lineshaft.limits (
    -- What all tasks together may cost in a UTC day.
    daily_budget_usd numeric(20, 6),
    -- More than this within the window stops everything, or pauses claims.
    velocity_usd numeric(20, 6),
    velocity_window_sec double precision NOT NULL DEFAULT 600,
    velocity_action text NOT NULL DEFAULT 'stop' CHECK (velocity_action IN ('stop', 'pause')),
    -- What a claim reserves for a task without a limit of its own (reservation_1).
    default_max_cost_usd numeric(20, 6),
    -- The least share of its reservation that a crashed attempt is taken to have cost.
    crash_cost_fraction numeric(7, 6) NOT NULL DEFAULT 0,
    -- The thresholds of circuit breakers, as in the file of an operator. NULL: the defaults.
    breakers jsonb,
    -- What claims have reserved of the day; only those made while there was a daily budget.
    reserved_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- The UTC day on which the daily budget was lowered below what was spent and reserved: reservations don't protect attempts then.
    daily_budget_cut date,
    -- The values that servers last took from their settings, by name: a setting changes a limit only once.
    applied jsonb NOT NULL DEFAULT '{}',
    only_row boolean NOT NULL DEFAULT true CHECK (only_row),
    CONSTRAINT limits_pkey PRIMARY KEY (only_row),
    CONSTRAINT possible_limits CHECK (reserved_usd >= 0)
) WITH (fillfactor = 50);
COMMENT ON TABLE lineshaft.limits IS 'Limits of the whole installation.';
INSERT INTO lineshaft.limits DEFAULT VALUES;

-- Samples of the total spend, for the cost-velocity stop; deleted after its window.
CREATE TABLE lineshaft.spend_sample (
    at timestamptz NOT NULL,
    total_usd numeric(20, 6) NOT NULL,
    CONSTRAINT spend_sample_pkey PRIMARY KEY (at)
);
COMMENT ON TABLE lineshaft.spend_sample IS 'Total spend over the last minutes, for the cost-velocity stop.';

CREATE TABLE lineshaft.day_alert (
    day date NOT NULL,
    CONSTRAINT day_alert_pkey PRIMARY KEY (day)
);
COMMENT ON TABLE lineshaft.day_alert IS 'Days (UTC) with an alert that the daily budget is used up.';


CREATE TABLE lineshaft.lock (
    token bigint NOT NULL DEFAULT nextval('lineshaft.lock_token'),
    acquired_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    key text COLLATE "C" NOT NULL,
    -- A task, or the batch whose children share the lock.
    holder_task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    CONSTRAINT lock_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.lock IS 'Document locks that are held.';


CREATE TABLE lineshaft.breaker (
    last_failure timestamptz,
    opened_at timestamptz,
    half_open_at timestamptz,
    -- A claim may take a probe after this. NULL: not automatically.
    probe_at timestamptz,
    failures integer NOT NULL DEFAULT 0,
    state lineshaft.breaker_state NOT NULL DEFAULT 'closed',
    forced boolean NOT NULL DEFAULT false,
    -- A task type, or any other key such as model:x.
    key text COLLATE "C" NOT NULL,
    probe_task_id text COLLATE "C",
    -- [[process, time]]: lost processes that were counted in the last 90 s. Each counts once, however many tasks it held.
    losses jsonb NOT NULL DEFAULT '[]',
    CONSTRAINT breaker_pkey PRIMARY KEY (key),
    CONSTRAINT open_since CHECK (state = 'closed' OR opened_at IS NOT NULL),
    CONSTRAINT half_open_since CHECK (state <> 'half_open' OR half_open_at IS NOT NULL),
    CONSTRAINT probe_only_half_open CHECK (probe_task_id IS NULL OR state = 'half_open'),
    CONSTRAINT forced_is_open CHECK (NOT forced OR state = 'open')
);
COMMENT ON TABLE lineshaft.breaker IS 'Circuit breakers; no row means closed with no failures.';
-- Breakers that claims and completions must check: none, as long as nothing fails.
CREATE INDEX breaker_troubled ON lineshaft.breaker (key) WHERE state <> 'closed' OR failures > 0;


CREATE TABLE lineshaft.slowdown (
    signalled_at timestamptz NOT NULL,
    until timestamptz NOT NULL,
    -- model:NAME; provider:NAME for all models NAME/…; * for all.
    key text COLLATE "C" NOT NULL,
    reason text,
    CONSTRAINT slowdown_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.slowdown IS 'Models and providers that claims avoid after a rate limit. A cleared one stays, as the latest signal.';


-- The history of failures is in attempt.
CREATE TABLE lineshaft.dead_letter (
    dead_lettered_at timestamptz NOT NULL,
    reviewed_at timestamptz,
    epoch integer NOT NULL,
    -- How often it was revived before. Not the epoch: a batch is never claimed, so its epoch never changes.
    revival smallint NOT NULL DEFAULT 0,
    poison_pill boolean NOT NULL DEFAULT false,
    -- An escalated one is reviewed, but still waits for a decision.
    reviewed boolean NOT NULL DEFAULT false,
    -- Deleted by a reviewer: not in lists any more.
    hidden boolean NOT NULL DEFAULT false,
    task_id text COLLATE "C" NOT NULL,
    total_cost_usd numeric(20, 6) NOT NULL,
    category text NOT NULL,
    error text NOT NULL,
    -- The error without its variable parts (model/error_pattern.py).
    pattern text COLLATE "C" NOT NULL,
    -- The last decision; all decisions are in review.
    resolution text CHECK (resolution IN ('retry', 'modify_and_retry', 'cancel', 'delete', 'escalate')),
    reviewer text,
    note text,
    CONSTRAINT dead_letter_pkey PRIMARY KEY (task_id, revival),
    CONSTRAINT reviewed_with_a_resolution CHECK (
        reviewed = (resolution IS NOT NULL) AND reviewed = (reviewed_at IS NOT NULL)
    )
);
COMMENT ON TABLE lineshaft.dead_letter IS 'Tasks that need a decision, and the last decision. Never deleted automatically.';
CREATE INDEX dead_letter_to_review ON lineshaft.dead_letter (dead_lettered_at) WHERE NOT reviewed;
CREATE INDEX dead_letter_by_age ON lineshaft.dead_letter (dead_lettered_at);

-- Every decision about a dead letter, append-only.
CREATE TABLE lineshaft.review (
    no bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL,
    not_before timestamptz,
    revival smallint NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    resolution text NOT NULL,
    -- NULL: a manual retry that bypassed the review.
    reviewer text,
    note text,
    -- The spec before the change, and the changes (model/spec_change.py).
    spec_before jsonb,
    spec_change jsonb,
    CONSTRAINT review_pkey PRIMARY KEY (task_id, no)
);
COMMENT ON TABLE lineshaft.review IS 'Decisions about dead letters.';


-- Destinations of notifications: one row for each that was ever configured (duties/deliverer.py).
CREATE TABLE lineshaft.destination (
    read_at timestamptz NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Its place in the event feed (feed/events.py).
    cursor text NOT NULL,
    CONSTRAINT destination_pkey PRIMARY KEY (name)
);
COMMENT ON TABLE lineshaft.destination IS 'The place of each destination of notifications in the event feed.';

-- The outbox: notices until they are delivered, and for some days after.
CREATE TABLE lineshaft.notification (
    id bigint GENERATED ALWAYS AS IDENTITY,
    noted_at timestamptz NOT NULL,
    -- When to send it; while it is being sent, the end of the sender's lease.
    due_at timestamptz NOT NULL,
    -- When it was first sent, for throttles.
    sent_at timestamptz,
    -- Delivered, or given up.
    done_at timestamptz,
    -- The message that has this notice, named after its first notice.
    message bigint,
    tries smallint NOT NULL DEFAULT 0,
    given_up boolean NOT NULL DEFAULT false,
    destination text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    body jsonb NOT NULL,
    last_error text,
    CONSTRAINT notification_pkey PRIMARY KEY (id),
    CONSTRAINT given_up_is_done CHECK (NOT given_up OR done_at IS NOT NULL)
);
COMMENT ON TABLE lineshaft.notification IS 'Notices for destinations, delivered or not.';
CREATE INDEX notification_waiting ON lineshaft.notification (destination, kind, id) WHERE done_at IS NULL;
CREATE INDEX notification_of_message ON lineshaft.notification (message) WHERE done_at IS NULL AND message IS NOT NULL;
-- Throttles.
CREATE INDEX notification_sent ON lineshaft.notification (destination, sent_at) WHERE sent_at IS NOT NULL;
CREATE INDEX notification_done ON lineshaft.notification (done_at) WHERE done_at IS NOT NULL;


CREATE TABLE lineshaft.token (
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    id text COLLATE "C" NOT NULL,
    name text NOT NULL,
    scope text NOT NULL CHECK (scope IN ('read', 'submit', 'agent', 'operate', 'admin')),
    -- sha256 of the token, which is shown once and never stored.
    hash bytea NOT NULL,
    -- The only agent that it may act as; NULL: any.
    agent_id text COLLATE "C",
    -- The agent's budget, in place of what it declares itself.
    budget_usd numeric(20, 6),
    CONSTRAINT token_pkey PRIMARY KEY (id),
    CONSTRAINT token_hash UNIQUE (hash),
    CONSTRAINT bound_token_is_of_an_agent CHECK (agent_id IS NULL OR scope = 'agent'),
    CONSTRAINT budget_is_of_a_bound_token CHECK (budget_usd IS NULL OR (agent_id IS NOT NULL AND budget_usd >= 0))
);
COMMENT ON TABLE lineshaft.token IS 'Bearer tokens of the HTTP API, hashed.';

CREATE TABLE lineshaft.session (
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Of the last request, to some minutes.
    used_at timestamptz NOT NULL DEFAULT now(),
    -- sha256 of the cookie.
    hash bytea NOT NULL,
    -- NULL: no token was needed when the session began.
    token_id text COLLATE "C",
    -- Who acts: the token's name, or what the person entered.
    name text NOT NULL,
    CONSTRAINT session_pkey PRIMARY KEY (hash)
);
COMMENT ON TABLE lineshaft.session IS 'Sessions of the dashboard. A session ends with its token.';
CREATE INDEX session_by_use ON lineshaft.session (used_at);

-- The key of claim tokens. At most one row, created by the first server that needs it.
CREATE TABLE lineshaft.claim_key (
    key bytea NOT NULL CHECK (length(key) = 32),
    only_row boolean NOT NULL DEFAULT true CHECK (only_row),
    CONSTRAINT claim_key_pkey PRIMARY KEY (only_row)
);
COMMENT ON TABLE lineshaft.claim_key IS 'Secret: the key of claim tokens. Roles that can only read see no row.';
-- With the key, one can act as the holder of any claim. A role with SELECT on all tables, or in pg_read_all_data, must not see it.
REVOKE ALL ON lineshaft.claim_key FROM PUBLIC;
ALTER TABLE lineshaft.claim_key ENABLE ROW LEVEL SECURITY;
CREATE POLICY claim_key_of_writers ON lineshaft.claim_key USING (has_table_privilege('lineshaft.claim_key', 'INSERT'));


-- The audit trail, and the event feed. Sequence numbers commit out of order, so a reader's cursor is a window between two snapshots
-- (feed/events.py): it needs the transaction id of each row.
CREATE TABLE lineshaft.event (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    at timestamptz NOT NULL DEFAULT now(),
    epoch integer,
    -- What one transaction did to one task is one row: {task.claimed,task.started}. The view events has a row for each kind.
    kinds text[] NOT NULL,
    task_id text COLLATE "C",
    dag_id text COLLATE "C",
    agent_id text COLLATE "C",
    data jsonb
) PARTITION BY RANGE (at);
COMMENT ON TABLE lineshaft.event IS 'All events, append-only. Partitioned by time.';
-- Both without seq: a transaction or a task is then stored once, and its events are few enough to be sorted.
CREATE INDEX event_feed ON lineshaft.event (xid);
CREATE INDEX event_of_task ON lineshaft.event (task_id) WHERE task_id IS NOT NULL;
-- Old history, page by page. Numbers correlate with positions, so that a few bytes per page range find them.
CREATE INDEX event_by_seq ON lineshaft.event USING brin (seq) WITH (autosummarize = on);
-- Takes rows without a partition, so that no transition ever fails for lack of one.
CREATE TABLE lineshaft.event_default PARTITION OF lineshaft.event DEFAULT;

-- The highest transaction of any dropped partition: a reader that stopped before it has missed events. At most one row.
CREATE TABLE lineshaft.event_horizon (
    xid xid8 NOT NULL,
    at timestamptz NOT NULL
);
COMMENT ON TABLE lineshaft.event_horizon IS 'The end of the events that retention has deleted.';

-- For people.
CREATE VIEW lineshaft.events AS
SELECT event.seq, kind.n, kind.kind, event.at, event.task_id,
    -- Those of a standalone task are written without its DAG, which has no row.
    coalesce(event.dag_id, (SELECT task.dag_id FROM lineshaft.task WHERE task.id = event.task_id)) AS dag_id,
    event.agent_id, event.epoch, event.data
FROM lineshaft.event
CROSS JOIN LATERAL unnest(event.kinds) WITH ORDINALITY AS kind (kind, n)
UNION ALL
SELECT event.seq, cardinality(event.kinds) + 1, dag.kind, event.at, NULL,
    (SELECT task.dag_id FROM lineshaft.task WHERE task.id = event.task_id),
    CASE WHEN dag.kind = 'dag.running' THEN event.agent_id END, NULL, '{"single": true}'
FROM lineshaft.event
CROSS JOIN LATERAL (SELECT lineshaft.dag_kind(event.kinds, event.epoch) AS kind) AS dag
WHERE event.dag_id IS NULL AND dag.kind IS NOT NULL;
COMMENT ON VIEW lineshaft.events IS 'All events, one row each: SELECT * FROM lineshaft.events WHERE task_id = … ORDER BY seq, n';


-- Totals for Prometheus, which needs numbers that only grow: counting the history would be slow, and shrink with retention.
CREATE TABLE lineshaft.tally (
    value numeric NOT NULL,
    name text COLLATE "C" NOT NULL,
    labels text[] NOT NULL,
    CONSTRAINT tally_pkey PRIMARY KEY (name, labels)
);
COMMENT ON TABLE lineshaft.tally IS 'Totals of events, updated when metrics are read.';

-- The place in the event feed up to which events are counted. One row.
CREATE TABLE lineshaft.tally_place (
    since pg_snapshot NOT NULL
);
COMMENT ON TABLE lineshaft.tally_place IS 'The place of tally in the event feed.';
INSERT INTO lineshaft.tally_place (since) VALUES ('1:1:');


-- For people: one row per task, live or ended.
--
-- Live tasks are three parts, so that a filter reads no more than it must: held ones by task_live_leased, RETRYING ones by task_live_due. In
-- the other parts heartbeat_at and retry_at are constants, so that PostgreSQL leaves them out.
CREATE VIEW lineshaft.tasks AS
SELECT
    task.id, live.status, task.type, task.title, live.priority,
    live.rank - lane.boost_per_minute * lineshaft.minutes(now()) AS effective_priority,
    task.dag_id, task.parent_id, task.idempotency_key, live.agent_id AS claim_agent_id, live.model, live.epoch, live.attempts,
    task.max_attempts, live.blocked, live.parked,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id ORDER BY edge.depends_on) AS depends_on,
    ARRAY(
        SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id AND NOT edge.satisfied ORDER BY edge.depends_on
    ) AS blocked_by,
    task.required_capabilities, task.model_preferences, task.fallback_models,
    task.lock_key, (live.cost_usd + live.attempt_cost_usd)::numeric(20, 6) AS cost_usd, task.max_cost_usd, live.reserved_usd,
    live.tokens_input + live.attempt_tokens_input AS tokens_input, live.tokens_output + live.attempt_tokens_output AS tokens_output, live.deadline,
    CASE WHEN live.status = 'PENDING' THEN coalesce(live.due_at, task.run_at) ELSE task.run_at END AS run_at,
    live.retry_at,
    task.created_at, live.ready_at, live.claimed_at, live.first_started_at,
    coalesce(live.started_at, (
        SELECT attempt.started_at FROM lineshaft.attempt
        WHERE attempt.task_id = task.id AND attempt.started_at IS NOT NULL ORDER BY attempt.epoch DESC LIMIT 1
    )) AS started_at,
    live.held_heartbeat_at AS heartbeat_at, live.lease_until,
    NULL::timestamptz AS ended_at, NULL::timestamptz AS completed_at,
    live.last_category AS failure_category,
    CASE WHEN live.last_category IS NOT NULL THEN (
        SELECT attempt.error FROM lineshaft.attempt
        WHERE attempt.task_id = task.id AND attempt.error IS NOT NULL ORDER BY attempt.epoch DESC LIMIT 1
    ) END AS failure_reason,
    NULL::text AS cancel_reason, live.progress, task.spec, NULL::jsonb AS output, task.tags, task.created_by,
    task.created_by_token
FROM (
    SELECT live.*, live.heartbeat_at AS held_heartbeat_at, NULL::timestamptz AS retry_at
    FROM lineshaft.task_live AS live WHERE live.lease_until IS NOT NULL AND live.status IN ('CLAIMED', 'RUNNING', 'VALIDATING')
    UNION ALL
    SELECT live.*, NULL::timestamptz, live.due_at
    FROM lineshaft.task_live AS live WHERE live.status = 'RETRYING' AND live.due_at IS NOT NULL
    UNION ALL
    SELECT live.*, NULL::timestamptz, NULL::timestamptz
    FROM lineshaft.task_live AS live WHERE live.lease_until IS NULL AND live.status IN ('PENDING', 'READY', 'VALIDATING')
) AS live
JOIN lineshaft.task ON task.id = live.id
JOIN lineshaft.lane ON lane.id = live.lane_id
UNION ALL
SELECT
    task.id, ended.status, task.type, task.title, task.priority, NULL::double precision,
    task.dag_id, task.parent_id, task.idempotency_key, ended.agent_id, ended.model, ended.epoch, ended.attempts, task.max_attempts, 0,
    NULL::text,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id ORDER BY edge.depends_on),
    '{}'::text[] COLLATE "C",
    task.required_capabilities, task.model_preferences, task.fallback_models,
    task.lock_key, ended.cost_usd, task.max_cost_usd, 0::numeric(20, 6), ended.tokens_input, ended.tokens_output, task.deadline, task.run_at,
    NULL::timestamptz,
    task.created_at, ended.ready_at, ended.claimed_at, ended.first_started_at,
    coalesce(ended.started_at, (
        SELECT attempt.started_at FROM lineshaft.attempt
        WHERE attempt.task_id = task.id AND attempt.started_at IS NOT NULL ORDER BY attempt.epoch DESC LIMIT 1
    )),
    NULL::timestamptz, NULL::timestamptz,
    ended.ended_at, CASE WHEN ended.status = 'COMPLETED' THEN ended.ended_at END,
    ended.category, CASE WHEN ended.status = 'DEAD_LETTERED' THEN ended.reason END,
    CASE WHEN ended.status = 'CANCELLED' THEN ended.reason END, NULL::jsonb, task.spec, ended.output, task.tags, task.created_by,
    task.created_by_token
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id;
COMMENT ON VIEW lineshaft.tasks IS 'Every task: SELECT * FROM lineshaft.tasks WHERE status = ''RUNNING''';

CREATE VIEW lineshaft.dags AS
SELECT
    id, title, status, created_by, created_by_token, total, completed, cancelled, dead_lettered, budget_ceiling_usd, reserved_usd, spent_usd, created_at, ended_at,
    CASE WHEN status = 'completed' THEN ended_at END AS completed_at
FROM lineshaft.dag;
COMMENT ON VIEW lineshaft.dags IS 'DAGs of more than one task, or with a budget. The DAG of a standalone task exists only as its dag_id.';

CREATE VIEW lineshaft.attempts AS
SELECT
    task_id, epoch, number::integer AS number, revival::integer AS revival, outcome, agent_id, model, version, category, error,
    traceback, claimed_at, started_at, ended_at, cost_usd, tokens_input, tokens_output
FROM lineshaft.attempt
-- A completed attempt is recorded here too if its output was validated.
WHERE outcome <> 'completed'
UNION ALL
SELECT
    id, epoch, attempts + 1, revivals, 'running', agent_id, model, version, NULL, NULL, NULL, claimed_at, started_at, NULL, attempt_cost_usd,
    attempt_tokens_input, attempt_tokens_output
FROM lineshaft.task_live
WHERE lease_until IS NOT NULL AND status IN ('CLAIMED', 'RUNNING')
UNION ALL
SELECT
    ended.id, ended.epoch, ended.attempts + 1, ended.revivals, 'completed', ended.agent_id, ended.model, ended.version, NULL, NULL, NULL,
    ended.claimed_at, ended.started_at, ended.ended_at, (ended.cost_usd - earlier.cost_usd)::numeric(20, 6),
    (ended.tokens_input - earlier.tokens_input)::bigint, (ended.tokens_output - earlier.tokens_output)::bigint
FROM lineshaft.task_end AS ended
CROSS JOIN LATERAL (
    SELECT coalesce(sum(cost_usd), 0) AS cost_usd, coalesce(sum(tokens_input), 0) AS tokens_input,
        coalesce(sum(tokens_output), 0) AS tokens_output
    FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch < ended.epoch
) AS earlier
WHERE ended.status = 'COMPLETED' AND ended.claimed_at IS NOT NULL;
COMMENT ON VIEW lineshaft.attempts IS 'Every claim of a task and how it ended: SELECT * FROM lineshaft.attempts WHERE task_id = … ORDER BY epoch';

CREATE VIEW lineshaft.agents AS
SELECT
    agent.id, agent.type, coalesce(agent.set_status, of_instances.status) AS status, of_instances.instances, of_instances.current_tasks,
    agent.budget_usd, agent.spent_usd, agent.reserved_usd, agent.budget_usd - agent.spent_usd - agent.reserved_usd AS budget_remaining_usd,
    of_instances.last_heartbeat, agent.registered_at
FROM lineshaft.agent
CROSS JOIN LATERAL (
    -- The enum is in this order: active, draining, offline.
    SELECT coalesce(min(instance.status), 'offline') AS status, count(*) FILTER (WHERE instance.status <> 'offline') AS instances,
        coalesce(sum(instance.held), 0) AS current_tasks, max(instance.last_heartbeat) AS last_heartbeat
    FROM lineshaft.instance WHERE instance.agent_id = agent.id
) AS of_instances
WHERE agent.deleted_at IS NULL;
COMMENT ON VIEW lineshaft.agents IS 'Agents. The status is as last reported: last_heartbeat shows whether one is alive.';

-- Every column has a comment, which psql shows.

COMMENT ON COLUMN lineshaft.attempt.claimed_at IS 'When it was claimed.';
COMMENT ON COLUMN lineshaft.attempt.started_at IS 'When the attempt started.';
COMMENT ON COLUMN lineshaft.attempt.ended_at IS 'When it ended.';
COMMENT ON COLUMN lineshaft.attempt.gate_since IS 'Since when it waits for a gate that runs elsewhere.';
COMMENT ON COLUMN lineshaft.attempt.gate_due_at IS 'When a validator may take it; NULL: a person decides.';
COMMENT ON COLUMN lineshaft.attempt.tokens_input IS 'Input tokens.';
COMMENT ON COLUMN lineshaft.attempt.tokens_output IS 'Output tokens.';
COMMENT ON COLUMN lineshaft.attempt.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.attempt.gate_runs IS 'How often validators have started this gate.';
COMMENT ON COLUMN lineshaft.attempt.gate_no IS 'The number of the current gate.';
COMMENT ON COLUMN lineshaft.attempt.number IS 'The number of the attempt, from 1 after every revival.';
COMMENT ON COLUMN lineshaft.attempt.revival IS 'How often the task had been revived before.';
COMMENT ON COLUMN lineshaft.attempt.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.attempt.agent_id IS 'The agent.';
COMMENT ON COLUMN lineshaft.attempt.incarnation IS 'The instance of the agent.';
COMMENT ON COLUMN lineshaft.attempt.instance IS 'The name of the instance.';
COMMENT ON COLUMN lineshaft.attempt.model IS 'The model that the claim was given.';
COMMENT ON COLUMN lineshaft.attempt.version IS 'The version of the agent''s program, as it declares it.';
COMMENT ON COLUMN lineshaft.attempt.outcome IS 'validating, completed, failed, rate_limited, released, waiting or cancelled.';
COMMENT ON COLUMN lineshaft.attempt.category IS 'The category of the error.';
COMMENT ON COLUMN lineshaft.attempt.error IS 'The error.';
COMMENT ON COLUMN lineshaft.attempt.traceback IS 'The end of the traceback, if the agent sent one.';
COMMENT ON COLUMN lineshaft.attempt.ended_by IS 'The call of its agent that ended it; NULL: something else.';
COMMENT ON COLUMN lineshaft.attempt.cost_usd IS 'Cost in dollars, gates included.';
COMMENT ON COLUMN lineshaft.attempt.gate_cost_usd IS 'The part of the cost that gates on its output have caused.';
COMMENT ON COLUMN lineshaft.attempt.output IS '{data, artifacts, decision_report}, once submitted.';
COMMENT ON COLUMN lineshaft.attempt.gate IS 'The method of the gate that it waits for; NULL: none.';
COMMENT ON COLUMN lineshaft.attempt.gate_error IS 'Why the last validator reached no verdict.';
COMMENT ON COLUMN lineshaft.attempt.verdicts IS 'A verdict for each gate so far.';

COMMENT ON COLUMN lineshaft.attempts.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.attempts.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.attempts.number IS 'The number of the attempt, from 1 after every revival.';
COMMENT ON COLUMN lineshaft.attempts.revival IS 'How often the task had been revived before.';
COMMENT ON COLUMN lineshaft.attempts.outcome IS 'running, validating, completed, failed, rate_limited, released, waiting or cancelled.';
COMMENT ON COLUMN lineshaft.attempts.agent_id IS 'The agent.';
COMMENT ON COLUMN lineshaft.attempts.model IS 'The model that the claim was given.';
COMMENT ON COLUMN lineshaft.attempts.version IS 'The version of the agent''s program, as it declares it.';
COMMENT ON COLUMN lineshaft.attempts.category IS 'The category of the error.';
COMMENT ON COLUMN lineshaft.attempts.error IS 'The error.';
COMMENT ON COLUMN lineshaft.attempts.traceback IS 'The end of the traceback, if the agent sent one.';
COMMENT ON COLUMN lineshaft.attempts.claimed_at IS 'When it was claimed.';
COMMENT ON COLUMN lineshaft.attempts.started_at IS 'When the attempt started.';
COMMENT ON COLUMN lineshaft.attempts.ended_at IS 'When it ended.';
COMMENT ON COLUMN lineshaft.attempts.cost_usd IS 'Cost in dollars.';
COMMENT ON COLUMN lineshaft.attempts.tokens_input IS 'Input tokens.';
COMMENT ON COLUMN lineshaft.attempts.tokens_output IS 'Output tokens.';

COMMENT ON COLUMN lineshaft.breaker.last_failure IS 'The last failure that counted.';
COMMENT ON COLUMN lineshaft.breaker.opened_at IS 'When it opened.';
COMMENT ON COLUMN lineshaft.breaker.half_open_at IS 'When it became half open.';
COMMENT ON COLUMN lineshaft.breaker.probe_at IS 'When a claim may take a probe; NULL: not automatically.';
COMMENT ON COLUMN lineshaft.breaker.failures IS 'Failures in a row.';
COMMENT ON COLUMN lineshaft.breaker.state IS 'closed, open or half_open.';
COMMENT ON COLUMN lineshaft.breaker.forced IS 'Opened by hand; stays open until it is reset.';
COMMENT ON COLUMN lineshaft.breaker.key IS 'A task type, or another key such as model:NAME.';
COMMENT ON COLUMN lineshaft.breaker.probe_task_id IS 'The task that tests whether it works again.';
COMMENT ON COLUMN lineshaft.breaker.losses IS 'Lost processes that were counted in the last 90 s.';

COMMENT ON COLUMN lineshaft.checkpoint.recorded_at IS 'When it was recorded.';
COMMENT ON COLUMN lineshaft.checkpoint.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.checkpoint.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.checkpoint.data IS 'What the agent saved.';

COMMENT ON COLUMN lineshaft.claim_key.key IS 'The secret key.';
COMMENT ON COLUMN lineshaft.claim_key.only_row IS 'Keeps the table at one row.';

COMMENT ON COLUMN lineshaft.dag.created_at IS 'When it was created.';
COMMENT ON COLUMN lineshaft.dag.ended_at IS 'When it ended.';
COMMENT ON COLUMN lineshaft.dag.total IS 'All its tasks.';
COMMENT ON COLUMN lineshaft.dag.completed IS 'Tasks that are COMPLETED.';
COMMENT ON COLUMN lineshaft.dag.cancelled IS 'Tasks that are CANCELLED.';
COMMENT ON COLUMN lineshaft.dag.dead_lettered IS 'Tasks that are DEAD_LETTERED.';
COMMENT ON COLUMN lineshaft.dag.status IS 'pending, running, completed, failed or cancelled.';
COMMENT ON COLUMN lineshaft.dag.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.dag.title IS 'For people.';
COMMENT ON COLUMN lineshaft.dag.idempotency_key IS 'The key it was submitted with, if any.';
COMMENT ON COLUMN lineshaft.dag.created_by IS 'Who or what created it: agent:ID, human:NAME, cron:NAME and so on. A label; it proves nothing.';
COMMENT ON COLUMN lineshaft.dag.created_by_token IS 'The name of the token of the call that created it; NULL: the call had none, or was not over HTTP.';
COMMENT ON COLUMN lineshaft.dag.budget_ceiling_usd IS 'What all its tasks together may cost; NULL: no limit.';
COMMENT ON COLUMN lineshaft.dag.reserved_usd IS 'Money reserved for claims that are held.';
COMMENT ON COLUMN lineshaft.dag.spent_usd IS 'Money spent.';
COMMENT ON COLUMN lineshaft.dag.budget_cut IS 'The budget was lowered below what was spent and reserved.';
COMMENT ON COLUMN lineshaft.dag.spawned IS 'How many of its tasks were spawned by others.';

COMMENT ON COLUMN lineshaft.dag_key.key IS 'The idempotency key.';
COMMENT ON COLUMN lineshaft.dag_key.dag_id IS 'The DAG that owns it.';
COMMENT ON COLUMN lineshaft.dag_key.tasks IS 'Ids of its tasks by the keys of the call.';

COMMENT ON COLUMN lineshaft.dags.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.dags.title IS 'For people.';
COMMENT ON COLUMN lineshaft.dags.status IS 'pending, running, completed, failed or cancelled.';
COMMENT ON COLUMN lineshaft.dags.created_by IS 'Who or what created it: agent:ID, human:NAME, cron:NAME and so on. A label; it proves nothing.';
COMMENT ON COLUMN lineshaft.dags.created_by_token IS 'The name of the token of the call that created it; NULL: the call had none, or was not over HTTP.';
COMMENT ON COLUMN lineshaft.dags.total IS 'All its tasks.';
COMMENT ON COLUMN lineshaft.dags.completed IS 'Tasks that are COMPLETED.';
COMMENT ON COLUMN lineshaft.dags.cancelled IS 'Tasks that are CANCELLED.';
COMMENT ON COLUMN lineshaft.dags.dead_lettered IS 'Tasks that are DEAD_LETTERED.';
COMMENT ON COLUMN lineshaft.dags.budget_ceiling_usd IS 'What all its tasks together may cost; NULL: no limit.';
COMMENT ON COLUMN lineshaft.dags.reserved_usd IS 'Money reserved for claims that are held.';
COMMENT ON COLUMN lineshaft.dags.spent_usd IS 'Money spent.';
COMMENT ON COLUMN lineshaft.dags.created_at IS 'When it was created.';
COMMENT ON COLUMN lineshaft.dags.ended_at IS 'When it ended.';
COMMENT ON COLUMN lineshaft.dags.completed_at IS 'When it was completed; NULL unless completed.';

COMMENT ON COLUMN lineshaft.day_alert.day IS 'A UTC day.';

COMMENT ON COLUMN lineshaft.dead_letter.dead_lettered_at IS 'When the task became a dead letter.';
COMMENT ON COLUMN lineshaft.dead_letter.reviewed_at IS 'When it was decided.';
COMMENT ON COLUMN lineshaft.dead_letter.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.dead_letter.revival IS 'How often the task had been revived before.';
COMMENT ON COLUMN lineshaft.dead_letter.poison_pill IS 'It failed for several agents in the same way, or killed them.';
COMMENT ON COLUMN lineshaft.dead_letter.reviewed IS 'A decision was made; an escalated one still waits for another.';
COMMENT ON COLUMN lineshaft.dead_letter.hidden IS 'Deleted by a reviewer: not in lists.';
COMMENT ON COLUMN lineshaft.dead_letter.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.dead_letter.total_cost_usd IS 'What the task cost in all.';
COMMENT ON COLUMN lineshaft.dead_letter.category IS 'The category of the error.';
COMMENT ON COLUMN lineshaft.dead_letter.error IS 'The error.';
COMMENT ON COLUMN lineshaft.dead_letter.pattern IS 'The error without its variable parts.';
COMMENT ON COLUMN lineshaft.dead_letter.resolution IS 'The decision.';
COMMENT ON COLUMN lineshaft.dead_letter.reviewer IS 'Who decided.';
COMMENT ON COLUMN lineshaft.dead_letter.note IS 'What the reviewer wrote.';

COMMENT ON COLUMN lineshaft.destination.read_at IS 'When it last read the feed.';
COMMENT ON COLUMN lineshaft.destination.name IS 'Its name.';
COMMENT ON COLUMN lineshaft.destination.cursor IS 'Its place in the event feed.';

COMMENT ON COLUMN lineshaft.edge.task_id IS 'The task that waits.';
COMMENT ON COLUMN lineshaft.edge.depends_on IS 'The task that it waits for.';
COMMENT ON COLUMN lineshaft.edge.kind IS 'success: only COMPLETED satisfies it; ended: any end does.';
COMMENT ON COLUMN lineshaft.edge.satisfied IS 'The dependency is no longer open.';

COMMENT ON COLUMN lineshaft.event.seq IS 'Its number; numbers commit out of order.';
COMMENT ON COLUMN lineshaft.event.xid IS 'The transaction that wrote it.';
COMMENT ON COLUMN lineshaft.event.at IS 'When it happened.';
COMMENT ON COLUMN lineshaft.event.epoch IS 'The claim that it belongs to, if any.';
COMMENT ON COLUMN lineshaft.event.kinds IS 'What one transaction did to one task, in order.';
COMMENT ON COLUMN lineshaft.event.task_id IS 'The task, if any.';
COMMENT ON COLUMN lineshaft.event.dag_id IS 'The DAG, if any.';
COMMENT ON COLUMN lineshaft.event.agent_id IS 'The agent, if any.';
COMMENT ON COLUMN lineshaft.event.data IS 'Details.';

COMMENT ON COLUMN lineshaft.event_horizon.xid IS 'The highest transaction of any deleted event.';
COMMENT ON COLUMN lineshaft.event_horizon.at IS 'The end of what was deleted.';

COMMENT ON COLUMN lineshaft.events.seq IS 'Its number.';
COMMENT ON COLUMN lineshaft.events.n IS 'The place within the events of one row, from 1.';
COMMENT ON COLUMN lineshaft.events.kind IS 'The kind of the event, such as task.completed.';
COMMENT ON COLUMN lineshaft.events.at IS 'When it happened.';
COMMENT ON COLUMN lineshaft.events.task_id IS 'The task, if any.';
COMMENT ON COLUMN lineshaft.events.dag_id IS 'The DAG, if any.';
COMMENT ON COLUMN lineshaft.events.agent_id IS 'The agent, if any.';
COMMENT ON COLUMN lineshaft.events.epoch IS 'The claim that it belongs to, if any.';
COMMENT ON COLUMN lineshaft.events.data IS 'Details.';

COMMENT ON COLUMN lineshaft.generation.no IS 'Its number.';
COMMENT ON COLUMN lineshaft.generation.opened_by IS 'Transactions below this may still write into the one before.';
COMMENT ON COLUMN lineshaft.generation.opened_at IS 'When it was opened.';

COMMENT ON COLUMN lineshaft.lane.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.lane.type IS 'The task type.';
COMMENT ON COLUMN lineshaft.lane.required_capabilities IS 'What an agent must be capable of.';
COMMENT ON COLUMN lineshaft.lane.models IS 'Models that an agent must have one of; empty: any.';
COMMENT ON COLUMN lineshaft.lane.boost_per_minute IS 'How fast priority grows with age.';
COMMENT ON COLUMN lineshaft.lane.cost_from_usd IS 'The cost limits of its tasks are from this to less than twice this; NULL: they have none.';
COMMENT ON COLUMN lineshaft.lane.retired_at IS 'Since when no task uses it; NULL: it may be in use.';
COMMENT ON COLUMN lineshaft.lane.retired_by IS 'It can be deleted once all transactions below this have ended.';

COMMENT ON COLUMN lineshaft.lock.token IS 'A fencing number; it grows with every grant.';
COMMENT ON COLUMN lineshaft.lock.acquired_at IS 'Since when it is held.';
COMMENT ON COLUMN lineshaft.lock.expires_at IS 'When it ends unless it is renewed.';
COMMENT ON COLUMN lineshaft.lock.key IS 'Its key.';
COMMENT ON COLUMN lineshaft.lock.holder_task_id IS 'The task, or the batch whose children share it.';
COMMENT ON COLUMN lineshaft.lock.agent_id IS 'The agent that works on the task.';

COMMENT ON COLUMN lineshaft.notification.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.notification.noted_at IS 'When the event was read.';
COMMENT ON COLUMN lineshaft.notification.due_at IS 'When to send it; while it is being sent, the end of the lease.';
COMMENT ON COLUMN lineshaft.notification.sent_at IS 'When it was first sent.';
COMMENT ON COLUMN lineshaft.notification.done_at IS 'When it was delivered or given up.';
COMMENT ON COLUMN lineshaft.notification.message IS 'The message that has this notice.';
COMMENT ON COLUMN lineshaft.notification.tries IS 'How often it was sent.';
COMMENT ON COLUMN lineshaft.notification.given_up IS 'It could not be delivered.';
COMMENT ON COLUMN lineshaft.notification.destination IS 'Where it goes.';
COMMENT ON COLUMN lineshaft.notification.kind IS 'The kind of the notice.';
COMMENT ON COLUMN lineshaft.notification.body IS 'The notice.';
COMMENT ON COLUMN lineshaft.notification.last_error IS 'Why the last try failed.';

COMMENT ON COLUMN lineshaft.pause.since IS 'Since when.';
COMMENT ON COLUMN lineshaft.pause.type IS 'The task type; * is all.';
COMMENT ON COLUMN lineshaft.pause.reason IS 'Why; NULL: none was given.';
COMMENT ON COLUMN lineshaft.pause.actor IS 'Who paused it; NULL: unknown, or the cost-velocity stop.';
COMMENT ON COLUMN lineshaft.pause.stops IS 'Running attempts are released, too.';

COMMENT ON COLUMN lineshaft.review.no IS 'Its number.';
COMMENT ON COLUMN lineshaft.review.at IS 'When it was decided.';
COMMENT ON COLUMN lineshaft.review.not_before IS 'When the retry may start.';
COMMENT ON COLUMN lineshaft.review.revival IS 'How often the task had been revived before.';
COMMENT ON COLUMN lineshaft.review.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.review.resolution IS 'The decision.';
COMMENT ON COLUMN lineshaft.review.reviewer IS 'Who decided; NULL: a manual retry without a review.';
COMMENT ON COLUMN lineshaft.review.note IS 'What the reviewer wrote.';
COMMENT ON COLUMN lineshaft.review.spec_before IS 'The spec before the change.';
COMMENT ON COLUMN lineshaft.review.spec_change IS 'The change.';

COMMENT ON COLUMN lineshaft.slowdown.signalled_at IS 'When it was last signalled.';
COMMENT ON COLUMN lineshaft.slowdown.until IS 'When it ends.';
COMMENT ON COLUMN lineshaft.slowdown.key IS 'model:NAME, provider:NAME, or * for all.';
COMMENT ON COLUMN lineshaft.slowdown.reason IS 'Why.';

COMMENT ON COLUMN lineshaft.spend_sample.at IS 'When it was taken.';
COMMENT ON COLUMN lineshaft.spend_sample.total_usd IS 'Total spend until then.';

COMMENT ON COLUMN lineshaft.step.recorded_at IS 'When it was recorded.';
COMMENT ON COLUMN lineshaft.step.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.step.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.step.name IS 'The name of the step.';
COMMENT ON COLUMN lineshaft.step.digest IS 'Of the arguments it was called with; NULL: every call matches.';
COMMENT ON COLUMN lineshaft.step.cost_usd IS 'Cost in dollars.';
COMMENT ON COLUMN lineshaft.step.data IS 'Its result.';

COMMENT ON COLUMN lineshaft.tally.value IS 'The total.';
COMMENT ON COLUMN lineshaft.tally.name IS 'The metric.';
COMMENT ON COLUMN lineshaft.tally.labels IS 'The values of its labels.';

COMMENT ON COLUMN lineshaft.tally_place.since IS 'The place in the event feed.';

COMMENT ON COLUMN lineshaft.task.created_at IS 'When it was created.';
COMMENT ON COLUMN lineshaft.task.deadline IS 'When it should have ended; a change is in task_live while the task is live.';
COMMENT ON COLUMN lineshaft.task.run_at IS 'When it may start.';
COMMENT ON COLUMN lineshaft.task.priority_boost_per_minute IS 'How fast its priority grows with age.';
COMMENT ON COLUMN lineshaft.task.max_duration_sec IS 'The time limit of an attempt.';
COMMENT ON COLUMN lineshaft.task.heartbeat_interval_sec IS 'How often its agent sends heartbeats; NULL: the agent''s interval.';
COMMENT ON COLUMN lineshaft.task.priority IS '0 (first) to 100 (last), as submitted.';
COMMENT ON COLUMN lineshaft.task.max_attempts IS 'Attempts before it becomes a dead letter.';
COMMENT ON COLUMN lineshaft.task.require_decision_report IS 'Its output must have a decision report.';
COMMENT ON COLUMN lineshaft.task.ignore_failure IS 'Whether, as a dead letter, it counts as cancelled for its DAG: a spawned task.';
COMMENT ON COLUMN lineshaft.task.is_batch IS 'It has no work of its own and ends with its children.';
COMMENT ON COLUMN lineshaft.task.expire_at_deadline IS 'It is cancelled when its deadline passes.';
COMMENT ON COLUMN lineshaft.task.ignore_failure IS 'As a dead letter it counts as cancelled for its DAG.';
COMMENT ON COLUMN lineshaft.task.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.task.dag_id IS 'Its DAG; of a standalone task an id without a row.';
COMMENT ON COLUMN lineshaft.task.parent_id IS 'The task that created it, or the batch that it belongs to.';
COMMENT ON COLUMN lineshaft.task.idempotency_key IS 'The key it was submitted with, if any.';
COMMENT ON COLUMN lineshaft.task.type IS 'The task type.';
COMMENT ON COLUMN lineshaft.task.title IS 'For people.';
COMMENT ON COLUMN lineshaft.task.preset IS 'Defaults for retry, boost, limits and reports: factory, loki or officeplane.';
COMMENT ON COLUMN lineshaft.task.spec IS 'What to do, as it was submitted.';
COMMENT ON COLUMN lineshaft.task.key IS 'Its name among the tasks of its DAG, as submitted; NULL: none.';
COMMENT ON COLUMN lineshaft.task.inputs IS 'The tasks whose outputs it gets, by the name of the input: an id or a list of ids; NULL: none.';
COMMENT ON COLUMN lineshaft.task.required_capabilities IS 'What an agent must be capable of.';
COMMENT ON COLUMN lineshaft.task.model_preferences IS 'Preferred models, best first.';
COMMENT ON COLUMN lineshaft.task.fallback_models IS 'Models for when the preferred ones are not available.';
COMMENT ON COLUMN lineshaft.task.max_cost_usd IS 'The most that one attempt may cost; NULL: no limit.';
COMMENT ON COLUMN lineshaft.task.max_total_cost_usd IS 'The most that all attempts may cost; NULL: no limit.';
COMMENT ON COLUMN lineshaft.task.lock_key IS 'The document lock that it needs, if any.';
COMMENT ON COLUMN lineshaft.task.retry IS 'The retry policy; NULL: the preset''s.';
COMMENT ON COLUMN lineshaft.task.output_type IS 'The type of its output.';
COMMENT ON COLUMN lineshaft.task.gates IS 'Gates that the output must pass, in order; NULL: none.';
COMMENT ON COLUMN lineshaft.task.tags IS 'Labels.';
COMMENT ON COLUMN lineshaft.task.created_by IS 'Who or what created it: agent:ID, human:NAME, cron:NAME and so on. A label; it proves nothing.';
COMMENT ON COLUMN lineshaft.task.created_by_token IS 'The name of the token of the call that created it; NULL: the call had none, or was not over HTTP.';
COMMENT ON COLUMN lineshaft.task.surface IS 'What a compatible API received and must return.';

COMMENT ON COLUMN lineshaft.task_end.ended_at IS 'When it ended.';
COMMENT ON COLUMN lineshaft.task_end.ready_at IS 'When it first became READY; its age counts from then.';
COMMENT ON COLUMN lineshaft.task_end.claimed_at IS 'When it was claimed.';
COMMENT ON COLUMN lineshaft.task_end.started_at IS 'When the last attempt started.';
COMMENT ON COLUMN lineshaft.task_end.first_started_at IS 'When its first attempt started.';
COMMENT ON COLUMN lineshaft.task_end.tokens_input IS 'Input tokens.';
COMMENT ON COLUMN lineshaft.task_end.tokens_output IS 'Output tokens.';
COMMENT ON COLUMN lineshaft.task_end.epoch IS 'The number of the last claim.';
COMMENT ON COLUMN lineshaft.task_end.attempts IS 'Attempts that failed since it was submitted or revived.';
COMMENT ON COLUMN lineshaft.task_end.revivals IS 'How often it was revived.';
COMMENT ON COLUMN lineshaft.task_end.status IS 'COMPLETED, CANCELLED or DEAD_LETTERED.';
COMMENT ON COLUMN lineshaft.task_end.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.task_end.agent_id IS 'The agent of the last claim.';
COMMENT ON COLUMN lineshaft.task_end.incarnation IS 'The instance of the agent that held it last.';
COMMENT ON COLUMN lineshaft.task_end.model IS 'The model that the claim was given.';
COMMENT ON COLUMN lineshaft.task_end.version IS 'The version of the agent''s program, as it declares it.';
COMMENT ON COLUMN lineshaft.task_end.cost_usd IS 'Cost of all attempts.';
COMMENT ON COLUMN lineshaft.task_end.reason IS 'Why it failed permanently or was cancelled.';
COMMENT ON COLUMN lineshaft.task_end.category IS 'The category of the last error.';
COMMENT ON COLUMN lineshaft.task_end.output IS 'Its output.';
COMMENT ON COLUMN lineshaft.task_end.artifacts IS 'Artifacts of the output.';
COMMENT ON COLUMN lineshaft.task_end.decision_report IS 'The report that came with the output.';
COMMENT ON COLUMN lineshaft.task_end.output_type IS 'The type given with the output; NULL: the task''s.';

COMMENT ON COLUMN lineshaft.task_key.key IS 'The idempotency key.';
COMMENT ON COLUMN lineshaft.task_key.task_id IS 'The task that owns it.';
COMMENT ON COLUMN lineshaft.task_key.content_hash IS 'Of the submission, to flag other content under the same key.';
COMMENT ON COLUMN lineshaft.task_key.ttl_sec IS 'How long the key stays in force after the task has completed; NULL: forever.';
COMMENT ON COLUMN lineshaft.task_key.expires_at IS 'When the key is free again; NULL: in force.';
COMMENT ON COLUMN lineshaft.task_key.ttl_sec IS 'How long the key lasts after completion; NULL: without end.';

COMMENT ON COLUMN lineshaft.task_live.submission_no IS 'First come, first served among equal ranks.';
COMMENT ON COLUMN lineshaft.task_live.rank IS 'The order of claims inside a lane.';
COMMENT ON COLUMN lineshaft.task_live.rekey_at IS 'When the rank must be computed again.';
COMMENT ON COLUMN lineshaft.task_live.ready_at IS 'When it first became READY; its age counts from then.';
COMMENT ON COLUMN lineshaft.task_live.due_at IS 'When it becomes READY: a retry, a snooze or a start time.';
COMMENT ON COLUMN lineshaft.task_live.claimed_at IS 'When it was claimed.';
COMMENT ON COLUMN lineshaft.task_live.started_at IS 'When the current attempt started.';
COMMENT ON COLUMN lineshaft.task_live.first_started_at IS 'When its first attempt started.';
COMMENT ON COLUMN lineshaft.task_live.heartbeat_at IS 'The last heartbeat of the claim.';
COMMENT ON COLUMN lineshaft.task_live.lease_until IS 'When the claim ends without a heartbeat; NULL: not held.';
COMMENT ON COLUMN lineshaft.task_live.limit_at IS 'The end of the attempt''s time limit.';
COMMENT ON COLUMN lineshaft.task_live.deadline IS 'When it should have ended.';
COMMENT ON COLUMN lineshaft.task_live.tokens_input IS 'Input tokens.';
COMMENT ON COLUMN lineshaft.task_live.tokens_output IS 'Output tokens.';
COMMENT ON COLUMN lineshaft.task_live.lane_id IS 'Its lane.';
COMMENT ON COLUMN lineshaft.task_live.generation IS 'The part of the READY index it is in.';
COMMENT ON COLUMN lineshaft.task_live.heartbeat_sec IS 'The heartbeat interval in force; NULL until it is claimed.';
COMMENT ON COLUMN lineshaft.task_live.limit_sec IS 'The time limit of an attempt.';
COMMENT ON COLUMN lineshaft.task_live.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.task_live.blocked IS 'How many dependencies are open.';
COMMENT ON COLUMN lineshaft.task_live.attempts IS 'Attempts that failed since it was submitted or revived.';
COMMENT ON COLUMN lineshaft.task_live.rate_limits IS 'Rate limits in a row; they use no attempts.';
COMMENT ON COLUMN lineshaft.task_live.revivals IS 'How often it was revived.';
COMMENT ON COLUMN lineshaft.task_live.downstream IS 'Unfinished tasks on the longest chain below it.';
COMMENT ON COLUMN lineshaft.task_live.priority IS '0 (first) to 100 (last).';
COMMENT ON COLUMN lineshaft.task_live.is_batch IS 'It has no work of its own and ends with its children.';
COMMENT ON COLUMN lineshaft.task_live.is_gated IS 'Its output must pass a gate or have a report.';
COMMENT ON COLUMN lineshaft.task_live.expires IS 'It is cancelled when its deadline passes.';
COMMENT ON COLUMN lineshaft.task_live.awaited IS 'Another task depends on it.';
COMMENT ON COLUMN lineshaft.task_live.budget_reported IS 'It was reported that no agent can afford it.';
COMMENT ON COLUMN lineshaft.task_live.status IS 'Its state.';
COMMENT ON COLUMN lineshaft.task_live.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.task_live.dag_id IS 'Its DAG; NULL: a standalone task, whose DAG has no row.';
COMMENT ON COLUMN lineshaft.task_live.agent_id IS 'The agent that holds it.';
COMMENT ON COLUMN lineshaft.task_live.incarnation IS 'The instance of the agent that holds it.';
COMMENT ON COLUMN lineshaft.task_live.agent_reserved IS 'Its reservation is part of the agent''s.';
COMMENT ON COLUMN lineshaft.task_live.day_reserved IS 'Its reservation is part of the day''s.';
COMMENT ON COLUMN lineshaft.task_live.model IS 'The model that the claim was given.';
COMMENT ON COLUMN lineshaft.task_live.version IS 'The version of the agent''s program, as it declares it.';
COMMENT ON COLUMN lineshaft.task_live.parked IS 'Why claims don''t see it although it is READY: lock or dag_budget.';
COMMENT ON COLUMN lineshaft.task_live.lock_key IS 'The document lock that it needs, if any.';
COMMENT ON COLUMN lineshaft.task_live.lock_owner IS 'The batch that holds the lock for it; NULL: itself.';
COMMENT ON COLUMN lineshaft.task_live.lock_token IS 'The fencing number of the lock that its claim was given.';
COMMENT ON COLUMN lineshaft.task_live.max_cost_usd IS 'The most that an attempt may cost, which a claim reserves; NULL: no limit.';
COMMENT ON COLUMN lineshaft.task_live.reserved_usd IS 'Money reserved for claims that are held.';
COMMENT ON COLUMN lineshaft.task_live.cost_usd IS 'Cost of earlier attempts.';
COMMENT ON COLUMN lineshaft.task_live.attempt_cost_usd IS 'Cost of the current attempt so far.';
COMMENT ON COLUMN lineshaft.task_live.attempt_tokens_input IS 'Input tokens of the current attempt so far.';
COMMENT ON COLUMN lineshaft.task_live.attempt_tokens_output IS 'Output tokens of the current attempt so far.';
COMMENT ON COLUMN lineshaft.task_live.last_category IS 'The category of the last error.';
COMMENT ON COLUMN lineshaft.task_live.progress IS 'The last progress that its agent reported.';

COMMENT ON COLUMN lineshaft.tasks.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.tasks.status IS 'One of the eleven states, upper-case.';
COMMENT ON COLUMN lineshaft.tasks.type IS 'The task type.';
COMMENT ON COLUMN lineshaft.tasks.title IS 'For people.';
COMMENT ON COLUMN lineshaft.tasks.priority IS '0 (first) to 100 (last).';
COMMENT ON COLUMN lineshaft.tasks.effective_priority IS 'Priority minus boosts; the lowest value is claimed next.';
COMMENT ON COLUMN lineshaft.tasks.dag_id IS 'Its DAG; of a standalone task an id without a row.';
COMMENT ON COLUMN lineshaft.tasks.parent_id IS 'The task that created it, or the batch that it belongs to.';
COMMENT ON COLUMN lineshaft.tasks.idempotency_key IS 'The key it was submitted with, if any.';
COMMENT ON COLUMN lineshaft.tasks.claim_agent_id IS 'The agent that holds it, or held it last.';
COMMENT ON COLUMN lineshaft.tasks.model IS 'The model that the claim was given.';
COMMENT ON COLUMN lineshaft.tasks.epoch IS 'The number of the claim; it grows with every claim of the task.';
COMMENT ON COLUMN lineshaft.tasks.attempts IS 'Attempts that failed since it was submitted or revived.';
COMMENT ON COLUMN lineshaft.tasks.max_attempts IS 'Attempts before it becomes a dead letter.';
COMMENT ON COLUMN lineshaft.tasks.blocked IS 'How many dependencies are open.';
COMMENT ON COLUMN lineshaft.tasks.parked IS 'Why claims don''t see it although it is READY: lock or dag_budget.';
COMMENT ON COLUMN lineshaft.tasks.depends_on IS 'Tasks that it depends on.';
COMMENT ON COLUMN lineshaft.tasks.blocked_by IS 'Dependencies that are still open.';
COMMENT ON COLUMN lineshaft.tasks.required_capabilities IS 'What an agent must be capable of.';
COMMENT ON COLUMN lineshaft.tasks.model_preferences IS 'Preferred models, best first.';
COMMENT ON COLUMN lineshaft.tasks.fallback_models IS 'Models for when the preferred ones are not available.';
COMMENT ON COLUMN lineshaft.tasks.lock_key IS 'The document lock that it needs, if any.';
COMMENT ON COLUMN lineshaft.tasks.cost_usd IS 'Cost of all attempts so far.';
COMMENT ON COLUMN lineshaft.tasks.max_cost_usd IS 'The most that one attempt may cost; NULL: no limit.';
COMMENT ON COLUMN lineshaft.tasks.reserved_usd IS 'Money reserved for claims that are held.';
COMMENT ON COLUMN lineshaft.tasks.tokens_input IS 'Input tokens.';
COMMENT ON COLUMN lineshaft.tasks.tokens_output IS 'Output tokens.';
COMMENT ON COLUMN lineshaft.tasks.deadline IS 'When it should have ended.';
COMMENT ON COLUMN lineshaft.tasks.run_at IS 'When it may start.';
COMMENT ON COLUMN lineshaft.tasks.retry_at IS 'When it is tried again; NULL unless RETRYING.';
COMMENT ON COLUMN lineshaft.tasks.created_at IS 'When it was created.';
COMMENT ON COLUMN lineshaft.tasks.ready_at IS 'When it first became READY; its age counts from then.';
COMMENT ON COLUMN lineshaft.tasks.claimed_at IS 'When it was claimed.';
COMMENT ON COLUMN lineshaft.tasks.first_started_at IS 'When its first attempt started.';
COMMENT ON COLUMN lineshaft.tasks.started_at IS 'When the current or last attempt started.';
COMMENT ON COLUMN lineshaft.tasks.heartbeat_at IS 'The last heartbeat; NULL unless held.';
COMMENT ON COLUMN lineshaft.tasks.lease_until IS 'When the claim ends without a heartbeat; NULL: not held.';
COMMENT ON COLUMN lineshaft.tasks.ended_at IS 'When it was completed, cancelled or dead-lettered.';
COMMENT ON COLUMN lineshaft.tasks.completed_at IS 'When it was completed; NULL unless COMPLETED.';
COMMENT ON COLUMN lineshaft.tasks.failure_category IS 'The category of the last error.';
COMMENT ON COLUMN lineshaft.tasks.failure_reason IS 'The last error.';
COMMENT ON COLUMN lineshaft.tasks.cancel_reason IS 'Why it was cancelled.';
COMMENT ON COLUMN lineshaft.tasks.progress IS 'The last progress that its agent reported.';
COMMENT ON COLUMN lineshaft.tasks.spec IS 'What to do, as it was submitted.';
COMMENT ON COLUMN lineshaft.tasks.output IS 'Its output; NULL unless COMPLETED.';
COMMENT ON COLUMN lineshaft.tasks.tags IS 'Labels.';
COMMENT ON COLUMN lineshaft.tasks.created_by IS 'Who or what created it: agent:ID, human:NAME, cron:NAME and so on. A label; it proves nothing.';
COMMENT ON COLUMN lineshaft.tasks.created_by_token IS 'The name of the token of the call that created it; NULL: the call had none, or was not over HTTP.';

COMMENT ON COLUMN lineshaft.session.created_at IS 'When the person logged in.';
COMMENT ON COLUMN lineshaft.session.used_at IS 'The last request, to some minutes.';
COMMENT ON COLUMN lineshaft.session.hash IS 'SHA-256 of the cookie.';
COMMENT ON COLUMN lineshaft.session.token_id IS 'The token that was used to log in; NULL: none was needed.';
COMMENT ON COLUMN lineshaft.session.name IS 'Who acts: the name of the token, or what the person entered.';
COMMENT ON COLUMN lineshaft.token.created_at IS 'When it was created.';
COMMENT ON COLUMN lineshaft.token.revoked_at IS 'When it was revoked; NULL: valid.';
COMMENT ON COLUMN lineshaft.token.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.token.name IS 'For people.';
COMMENT ON COLUMN lineshaft.token.scope IS 'read, submit, agent, operate or admin.';
COMMENT ON COLUMN lineshaft.token.hash IS 'SHA-256 of the token, which is never stored.';
COMMENT ON COLUMN lineshaft.token.agent_id IS 'The only agent it may act as; NULL: any.';
COMMENT ON COLUMN lineshaft.token.budget_usd IS 'The budget of that agent.';

COMMENT ON COLUMN lineshaft.agent.registered_at IS 'When one of its instances was last registered.';
COMMENT ON COLUMN lineshaft.agent.deleted_at IS 'When it was deleted by hand; NULL: it was not.';
COMMENT ON COLUMN lineshaft.agent.incarnation IS 'Of the latest registration; grows with each.';
COMMENT ON COLUMN lineshaft.agent.set_max_tasks IS 'Slots of each instance, set by hand; NULL: as each declares.';
COMMENT ON COLUMN lineshaft.agent.set_status IS 'A status set by hand, which wins until it is cleared.';
COMMENT ON COLUMN lineshaft.agent.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.agent.type IS 'The kind of agent.';
COMMENT ON COLUMN lineshaft.agent.budget_usd IS 'What it may cost in all; NULL: unlimited.';
COMMENT ON COLUMN lineshaft.agent.spent_usd IS 'Money spent.';
COMMENT ON COLUMN lineshaft.agent.reserved_usd IS 'Money reserved for claims that were made under a budget.';
COMMENT ON COLUMN lineshaft.agent.budget_cut IS 'The budget was lowered below what was spent and reserved.';
COMMENT ON COLUMN lineshaft.instance.registered_at IS 'When it was registered.';
COMMENT ON COLUMN lineshaft.instance.last_heartbeat IS 'When it was last heard of.';
COMMENT ON COLUMN lineshaft.instance.poll_interval_sec IS 'How often it looks for work without notifications.';
COMMENT ON COLUMN lineshaft.instance.claim_ttl_sec IS 'How long a claim lasts until it is started.';
COMMENT ON COLUMN lineshaft.instance.heartbeat_interval_sec IS 'How often it sends heartbeats by default.';
COMMENT ON COLUMN lineshaft.instance.incarnation IS 'Its number within the agent; leases belong to it.';
COMMENT ON COLUMN lineshaft.instance.max_concurrent_tasks IS 'How many tasks it holds at most.';
COMMENT ON COLUMN lineshaft.instance.set_max_tasks IS 'The same, set by hand for all instances of the agent.';
COMMENT ON COLUMN lineshaft.instance.held IS 'How many tasks it holds.';
COMMENT ON COLUMN lineshaft.instance.busy_sec IS 'How long it has held at least one task, up to busy_since.';
COMMENT ON COLUMN lineshaft.instance.busy_since IS 'Since when it holds at least one task; NULL: it holds none.';
COMMENT ON COLUMN lineshaft.instance.status IS 'What its process reported last.';
COMMENT ON COLUMN lineshaft.instance.set_status IS 'A status set by hand for the agent, which wins.';
COMMENT ON COLUMN lineshaft.instance.silence_reported IS 'It was reported as silent since its last heartbeat.';
COMMENT ON COLUMN lineshaft.instance.agent_id IS 'The agent.';
COMMENT ON COLUMN lineshaft.instance.name IS 'The name of the process.';
COMMENT ON COLUMN lineshaft.instance.host IS 'The machine that it runs on.';
COMMENT ON COLUMN lineshaft.instance.version IS 'The version of its program, as it declares it.';
COMMENT ON COLUMN lineshaft.instance.capabilities IS 'What it is capable of.';
COMMENT ON COLUMN lineshaft.instance.types IS 'Task types that it takes; NULL: any that it is capable of.';
COMMENT ON COLUMN lineshaft.instance.models_available IS 'Models that it can use.';
COMMENT ON COLUMN lineshaft.instance.registration_key IS 'The idempotency key of its registration, if any.';
COMMENT ON COLUMN lineshaft.spend.day IS 'The day, in UTC.';
COMMENT ON COLUMN lineshaft.spend.spent_usd IS 'Money spent on it.';
COMMENT ON COLUMN lineshaft.limits.daily_budget_usd IS 'What all tasks together may cost in a UTC day; NULL: no limit.';
COMMENT ON COLUMN lineshaft.limits.velocity_usd IS 'Spending more than this within the window is too fast; NULL: no limit.';
COMMENT ON COLUMN lineshaft.limits.velocity_window_sec IS 'The window of velocity_usd.';
COMMENT ON COLUMN lineshaft.limits.velocity_action IS 'What happens then: stop or pause.';
COMMENT ON COLUMN lineshaft.limits.default_max_cost_usd IS 'What a claim reserves for a task without a limit of its own; it does not limit the task.';
COMMENT ON COLUMN lineshaft.limits.crash_cost_fraction IS 'The least share of its reservation that a crashed attempt costs.';
COMMENT ON COLUMN lineshaft.limits.breakers IS 'Thresholds of circuit breakers; NULL: the defaults.';
COMMENT ON COLUMN lineshaft.limits.reserved_usd IS 'Money of the day that claims have reserved.';
COMMENT ON COLUMN lineshaft.limits.daily_budget_cut IS 'The UTC day on which the daily budget was lowered below what was spent and reserved.';
COMMENT ON COLUMN lineshaft.limits.applied IS 'The settings that servers last applied, by name.';
COMMENT ON COLUMN lineshaft.limits.only_row IS 'There is one row.';
COMMENT ON COLUMN lineshaft.agents.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.agents.type IS 'The kind of agent.';
COMMENT ON COLUMN lineshaft.agents.status IS 'active, draining or offline: as set by hand, otherwise the best of its instances.';
COMMENT ON COLUMN lineshaft.agents.instances IS 'How many processes it has.';
COMMENT ON COLUMN lineshaft.agents.current_tasks IS 'How many tasks they hold.';
COMMENT ON COLUMN lineshaft.agents.budget_usd IS 'What it may cost in all; NULL: unlimited.';
COMMENT ON COLUMN lineshaft.agents.spent_usd IS 'Money spent.';
COMMENT ON COLUMN lineshaft.agents.reserved_usd IS 'Money reserved for claims that are held.';
COMMENT ON COLUMN lineshaft.agents.budget_remaining_usd IS 'Budget minus spent and reserved money; NULL: unlimited.';
COMMENT ON COLUMN lineshaft.agents.last_heartbeat IS 'When one of its processes was last heard of.';
COMMENT ON COLUMN lineshaft.agents.registered_at IS 'When one of its processes was last registered.';
