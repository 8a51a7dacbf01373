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
    required_capabilities text[] NOT NULL DEFAULT '{}',
    model_preferences text[] NOT NULL DEFAULT '{}',
    fallback_models text[] NOT NULL DEFAULT '{}',
    max_cost_usd numeric(14, 6),
    max_total_cost_usd numeric(14, 6),
    lock_key text COLLATE "C",
    -- NULL: the preset's policy.
    retry jsonb,
    output_type text,
    -- The gates that the output must pass, in order; NULL: none.
    gates jsonb,
    tags text[] NOT NULL DEFAULT '{}',
    created_by text,
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
    -- NULL: paused manually.
    reason text,
    CONSTRAINT pause_pkey PRIMARY KEY (type)
);
COMMENT ON TABLE lineshaft.pause IS 'Types that are paused, manually or by the cost-velocity stop; * is all.';


-- Interchangeable tasks: the same eligibility and the same rate of ageing (model/priority.py). Few rows, never updated.
CREATE TABLE lineshaft.lane (
    id integer GENERATED ALWAYS AS IDENTITY,
    type text NOT NULL,
    required_capabilities text[] NOT NULL,
    models text[] NOT NULL,
    boost_per_minute double precision NOT NULL,
    max_cost_usd numeric(14, 6),
    CONSTRAINT lane_pkey PRIMARY KEY (id)
);
COMMENT ON TABLE lineshaft.lane IS 'Sets of tasks with the same eligibility for agents and the same rate of ageing.';
-- NULL is a value here; PostgreSQL 14 has no NULLS NOT DISTINCT. -1 is not a valid cost.
CREATE UNIQUE INDEX lane_identity ON lineshaft.lane
    (type, required_capabilities, models, boost_per_minute, (coalesce(max_cost_usd, -1)));


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
    -- Another task depends on this one, which has no DAG: its end must look for dependents. In a DAG it always does.
    awaited boolean NOT NULL DEFAULT false,
    -- It was reported that no agent can afford it: once, until it is claimed or there is money again.
    budget_reported boolean NOT NULL DEFAULT false,
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
    reserved_usd numeric(14, 6) NOT NULL DEFAULT 0,
    -- Of earlier attempts, and of the current one so far.
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0,
    attempt_cost_usd numeric(14, 6) NOT NULL DEFAULT 0,
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
    attempts smallint NOT NULL DEFAULT 0,
    revivals smallint NOT NULL DEFAULT 0,
    status lineshaft.task_status NOT NULL,
    id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    model text,
    -- Of the program that its agent runs.
    version text,
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0,
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
    budget_ceiling_usd numeric(14, 6),
    reserved_usd numeric(14, 6) NOT NULL DEFAULT 0,
    spent_usd numeric(14, 6) NOT NULL DEFAULT 0,
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
    task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    model text,
    -- Of the program that its agent runs.
    version text,
    outcome text NOT NULL CHECK (
        outcome IN ('validating', 'completed', 'failed', 'rate_limited', 'released', 'waiting', 'cancelled')
    ),
    category text,
    error text,
    -- The call with the claim's token that ended it: fail, complete or release. NULL: something else, so every call is stale.
    ended_by text,
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0 CHECK (cost_usd >= 0),
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
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0 CHECK (cost_usd >= 0),
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


CREATE TABLE lineshaft.agent (
    registered_at timestamptz NOT NULL,
    last_heartbeat timestamptz NOT NULL,
    poll_interval_sec double precision NOT NULL DEFAULT 5,
    claim_ttl_sec double precision NOT NULL DEFAULT 60,
    heartbeat_interval_sec double precision NOT NULL DEFAULT 30,
    -- A new one with each registration; leases belong to the incarnation, money belongs to the id.
    incarnation bigint NOT NULL,
    max_concurrent_tasks integer NOT NULL,
    -- The number of held tasks, updated in the same transaction. Counting rows would read every dead index entry of past claims.
    held integer NOT NULL DEFAULT 0,
    -- What its process reports: offline once it has left. A process that is just gone is recognised by the age of last_heartbeat.
    status lineshaft.agent_status NOT NULL DEFAULT 'active',
    -- Set by hand, draining or offline; it wins until it is cleared by hand. NULL: not set.
    set_status lineshaft.agent_status,
    -- The offline detector has reported that it is silent: once, until its next heartbeat.
    silence_reported boolean NOT NULL DEFAULT false,
    id text COLLATE "C" NOT NULL,
    type text,
    capabilities text[] NOT NULL DEFAULT '{}',
    -- NULL: any type that it is capable of.
    types text[],
    models_available text[] NOT NULL DEFAULT '{}',
    -- Of the program that it runs, as it declares it; recorded with each attempt.
    version text,
    -- NULL: unlimited.
    budget_usd numeric(14, 6),
    spent_usd numeric(14, 6) NOT NULL DEFAULT 0,
    reserved_usd numeric(14, 6) NOT NULL DEFAULT 0,
    -- Its spend on spend_day, its last UTC day with a claim or an end. The daily spend is the sum over agents: the row is written anyway,
    -- and agents don't wait for each other.
    spent_on_day_usd numeric(14, 6) NOT NULL DEFAULT 0,
    spend_day date,
    -- The idempotency key that its incarnation was registered with, if any.
    registration_key text COLLATE "C",
    CONSTRAINT agent_pkey PRIMARY KEY (id),
    CONSTRAINT possible_agent CHECK (held >= 0 AND reserved_usd >= 0)
) WITH (
    -- Updated with every claim and heartbeat, on no indexed column: leave room on the page.
    fillfactor = 50
);
COMMENT ON TABLE lineshaft.agent IS 'Agents, with their capabilities and budgets.';
-- The daily budget: agents with recent spend. The day changes once a day, so all other updates stay on their page.
CREATE INDEX agent_by_spend_day ON lineshaft.agent (spend_day);
CREATE UNIQUE INDEX agent_registration_key ON lineshaft.agent (registration_key) WHERE registration_key IS NOT NULL;

-- Samples of the total spend, for the cost-velocity stop; deleted after its window.
CREATE TABLE lineshaft.spend_sample (
    at timestamptz NOT NULL,
    total_usd numeric(16, 6) NOT NULL,
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
    total_cost_usd numeric(14, 6) NOT NULL,
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
    budget_usd numeric(14, 6),
    CONSTRAINT token_pkey PRIMARY KEY (id),
    CONSTRAINT token_hash UNIQUE (hash),
    CONSTRAINT bound_token_is_of_an_agent CHECK (agent_id IS NULL OR scope = 'agent'),
    CONSTRAINT budget_is_of_a_bound_token CHECK (budget_usd IS NULL OR (agent_id IS NOT NULL AND budget_usd >= 0))
);
COMMENT ON TABLE lineshaft.token IS 'Bearer tokens of the HTTP API, hashed.';

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
SELECT event.seq, kind.n, kind.kind, event.at, event.task_id, event.dag_id, event.agent_id, event.epoch, event.data
FROM lineshaft.event
CROSS JOIN LATERAL unnest(event.kinds) WITH ORDINALITY AS kind (kind, n);
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
CREATE VIEW lineshaft.tasks AS
SELECT
    task.id, live.status, task.type, task.title, live.priority,
    live.rank - lane.boost_per_minute * lineshaft.minutes(now()) AS effective_priority,
    task.dag_id, task.parent_id, task.idempotency_key, live.agent_id, live.model, live.epoch, live.attempts, task.max_attempts, live.blocked,
    live.parked,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id ORDER BY edge.depends_on) AS depends_on,
    ARRAY(
        SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id AND NOT edge.satisfied ORDER BY edge.depends_on
    ) AS blocked_by,
    task.lock_key, (live.cost_usd + live.attempt_cost_usd)::numeric(14, 6) AS cost_usd, task.max_cost_usd, live.reserved_usd,
    live.tokens_input, live.tokens_output, task.deadline,
    CASE WHEN live.status = 'PENDING' THEN coalesce(live.due_at, task.run_at) ELSE task.run_at END AS run_at,
    CASE WHEN live.status = 'RETRYING' THEN live.due_at END AS retry_at,
    task.created_at, live.ready_at, live.claimed_at, live.started_at, live.heartbeat_at, live.lease_until, NULL::timestamptz AS ended_at,
    live.last_category AS category, NULL::text AS reason, live.progress, task.spec, NULL::jsonb AS output, task.tags, task.created_by
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
JOIN lineshaft.lane ON lane.id = live.lane_id
UNION ALL
SELECT
    task.id, ended.status, task.type, task.title, task.priority, NULL::double precision,
    task.dag_id, task.parent_id, task.idempotency_key, ended.agent_id, ended.model, ended.epoch, ended.attempts, task.max_attempts, 0,
    NULL::text,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id ORDER BY edge.depends_on),
    '{}'::text[] COLLATE "C",
    task.lock_key, ended.cost_usd, task.max_cost_usd, 0::numeric(14, 6), ended.tokens_input, ended.tokens_output, task.deadline, task.run_at,
    NULL::timestamptz,
    task.created_at, ended.ready_at, ended.claimed_at, ended.started_at, NULL::timestamptz, NULL::timestamptz, ended.ended_at,
    ended.category, ended.reason, NULL::jsonb, task.spec, ended.output, task.tags, task.created_by
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id;
COMMENT ON VIEW lineshaft.tasks IS 'Every task: SELECT * FROM lineshaft.tasks WHERE status = ''RUNNING''';
