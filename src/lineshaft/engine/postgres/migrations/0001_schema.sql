-- The tables of Lineshaft. docs/architecture.md tells how a task moves through them.
--
-- A task is split in three so that what changes often stays small:
--   task       what was asked: wide, written once
--   task_live  where it stands: one narrow row while it has not ended, deleted when it ends
--   task_end   how it ended
-- The view `tasks` puts them together again for people.
--
-- There are no foreign keys between them: every statement that writes one of them writes the others in the same
-- transaction, and a key check for each would double the index look-ups of the hot path.
-- (migrate.py has made the schema `lineshaft` itself, to keep its records in.)

-- The eleven states of the state machine (model/states.py). CREATED and FAILED are passed through inside a
-- transaction and appear in history only.
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

-- First come, first served among equals: numbered as submitted, whatever the clocks of the submitters say.
CREATE SEQUENCE lineshaft.submission_no AS bigint CACHE 1;

-- The generation that tasks get when they become READY. Read as its last_value: a row that is updated would collect dead
-- versions just where every claim looks, which is what generations are there to avoid.
CREATE SEQUENCE lineshaft.generation_no AS integer MINVALUE 1;
-- Always by setval: nextval writes the log ahead, so that after a crash, and on a standby that takes over, it is 32 numbers further.
SELECT setval('lineshaft.generation_no', 1);

-- A true fencing number: it grows with every grant of any lock and is never given twice.
CREATE SEQUENCE lineshaft.lock_token AS bigint CACHE 1;


-- Minutes since 2026, as ranks count time (model/priority.py).
CREATE FUNCTION lineshaft.minutes(instant timestamptz) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN extract(epoch FROM instant - timestamptz '2026-01-01 00:00:00+00')::double precision / 60;

-- What claims are sorted by inside a lane (model/priority.py: rank). One expression, inlined wherever a task becomes READY or
-- is re-keyed; a test compares it with the model's.
CREATE FUNCTION lineshaft.rank(
    priority smallint, downstream smallint, boost_per_minute double precision,
    ready_at timestamptz, deadline timestamptz, now timestamptz
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN priority - least(downstream, 10) + boost_per_minute * lineshaft.minutes(ready_at)
    - CASE WHEN deadline IS NULL THEN 0
      ELSE 40 * power(2, -least(greatest(extract(epoch FROM deadline - now)::double precision / 3600, 0), 1000)) END;

-- When the deadline boost will have grown by half a point (model/priority.py: rekey_at). STABLE, as adding an interval to an instant is:
-- called IMMUTABLE it would not be inlined, but planned anew by every statement that names it.
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
    max_duration_sec double precision NOT NULL DEFAULT 300,
    heartbeat_interval_sec double precision,
    priority smallint NOT NULL DEFAULT 50,
    max_attempts smallint NOT NULL DEFAULT 3,
    require_decision_report boolean NOT NULL DEFAULT false,
    -- A batch has no work of its own: it ends with its children (R-192).
    is_batch boolean NOT NULL DEFAULT false,
    id text COLLATE "C" NOT NULL,
    dag_id text COLLATE "C" NOT NULL,
    parent_id text COLLATE "C",
    idempotency_key text COLLATE "C",
    type text NOT NULL,
    title text NOT NULL,
    -- Defaults for retry, boost, limits and reports: factory (004), loki (000) or officeplane (003).
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
    -- What a compatible surface was sent and must echo (the priority as it was spelled, instanceId, metadata, …).
    surface jsonb,
    CONSTRAINT task_pkey PRIMARY KEY (id),
    -- Short: a constraint is read from the catalog and prepared anew by every statement that writes a row. What else must be true
    -- of a task is checked by the model, and by the strict constraints that tests run with (tests/strict.sql).
    CONSTRAINT possible_task CHECK (priority BETWEEN 0 AND 100 AND max_attempts > 0)
);
COMMENT ON TABLE lineshaft.task IS 'What was asked. Written once; where it stands is in task_live or task_end. People read the view tasks.';

-- Members of a DAG, and of 004's (dag_id, status): the status is one primary key look-up away.
CREATE INDEX task_of_dag ON lineshaft.task (dag_id, id);
CREATE INDEX task_of_parent ON lineshaft.task (parent_id) WHERE parent_id IS NOT NULL;
-- Lists, newest first.
-- Without the id: all tasks of one call have one time, which the index then stores once.
CREATE INDEX task_by_age ON lineshaft.task (created_at);
CREATE INDEX task_of_document ON lineshaft.task (lock_key) WHERE lock_key IS NOT NULL;
CREATE INDEX task_by_tag ON lineshaft.task USING gin (tags) WHERE tags <> '{}';


-- Generations that claims look into. Claimed tasks leave dead entries at the head of the READY index, exactly where the next claim
-- looks, and while any old transaction is open nothing can clean them up. So the index is prefixed with a generation: once
-- five times as many tasks have left one as remain, the next is opened; when it is drained, it is removed here and never looked at again.
CREATE TABLE lineshaft.generation (
    no integer NOT NULL,
    -- Transactions below this may still write into its predecessor, which is closed when there are none. The largest number: nobody
    -- knows yet.
    opened_by xid8 NOT NULL DEFAULT pg_current_xact_id(),
    opened_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT generation_pkey PRIMARY KEY (no)
);
COMMENT ON TABLE lineshaft.generation IS 'Parts of the READY index that claims look into.';
INSERT INTO lineshaft.generation (no) VALUES (1);

-- Types whose tasks are not handed out; * is all.
CREATE TABLE lineshaft.pause (
    since timestamptz NOT NULL,
    type text COLLATE "C" NOT NULL,
    -- NULL: by hand.
    reason text,
    CONSTRAINT pause_pkey PRIMARY KEY (type)
);
COMMENT ON TABLE lineshaft.pause IS 'Types that are paused, by hand or by the cost-velocity stop; * is all.';


-- Interchangeable tasks: the same eligibility and the same rate of ageing (model/priority.py). Few, never updated.
CREATE TABLE lineshaft.lane (
    id integer GENERATED ALWAYS AS IDENTITY,
    type text NOT NULL,
    required_capabilities text[] NOT NULL,
    models text[] NOT NULL,
    boost_per_minute double precision NOT NULL,
    max_cost_usd numeric(14, 6),
    CONSTRAINT lane_pkey PRIMARY KEY (id)
);
COMMENT ON TABLE lineshaft.lane IS 'Sets of tasks that any agent either may or may not take, and that age at the same rate.';
-- NULL is a value here; NULLS NOT DISTINCT is not in PostgreSQL 14. -1 is no cost.
CREATE UNIQUE INDEX lane_identity ON lineshaft.lane
    (type, required_capabilities, models, boost_per_minute, (coalesce(max_cost_usd, -1)));


CREATE TABLE lineshaft.task_live (
    submission_no bigint NOT NULL DEFAULT nextval('lineshaft.submission_no'),
    -- What claims are sorted by inside a lane; holds until rekey_at.
    rank double precision NOT NULL,
    rekey_at timestamptz,
    -- When it first became READY: its age counts from here.
    ready_at timestamptz,
    -- When the promoter makes it READY: the end of a back-off, of a snooze, or the time it was scheduled for.
    due_at timestamptz,
    claimed_at timestamptz,
    started_at timestamptz,
    first_started_at timestamptz,
    heartbeat_at timestamptz,
    -- Past this the reaper takes it back. NULL: nobody holds it.
    lease_until timestamptz,
    -- The end of the execution limit; lease_until never passes it.
    limit_at timestamptz,
    deadline timestamptz,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    lane_id integer NOT NULL,
    generation integer NOT NULL DEFAULT 0,
    -- What it must be claimed again for after a miss: three of these. NULL until it is claimed.
    heartbeat_sec real,
    -- How long one attempt may take.
    limit_sec real NOT NULL DEFAULT 300,
    -- Grows with every claim, for ever: what an agent writes with an older one is refused.
    epoch integer NOT NULL DEFAULT 0,
    -- Dependencies that are still open.
    blocked integer NOT NULL DEFAULT 0,
    attempts smallint NOT NULL DEFAULT 0,
    -- Waits for rate limits in a row; they use no attempts (U13).
    rate_limits smallint NOT NULL DEFAULT 0,
    -- How often it was revived by hand.
    revivals smallint NOT NULL DEFAULT 0,
    -- Unfinished tasks on the longest chain below, for the critical-path boost.
    downstream smallint NOT NULL DEFAULT 0,
    priority smallint NOT NULL DEFAULT 50,
    is_batch boolean NOT NULL DEFAULT false,
    -- Its output must pass a gate or carry a decision report: it can't complete straight from RUNNING.
    is_gated boolean NOT NULL DEFAULT false,
    -- Something waits for this task, which has no DAG: its end must look for what. In a DAG that is looked for anyway.
    awaited boolean NOT NULL DEFAULT false,
    -- It is known to all that nobody can afford it: told once, until it is claimed or there is money again.
    budget_told boolean NOT NULL DEFAULT false,
    status lineshaft.task_status NOT NULL,
    id text COLLATE "C" NOT NULL,
    -- NULL while the DAG is virtual: a standalone task's, which has no row of its own.
    dag_id text COLLATE "C",
    agent_id text COLLATE "C",
    model text,
    -- Set: READY, but out of the claims' sight until what it waits for is there.
    parked text,
    lock_key text COLLATE "C",
    -- Who holds the lock on its behalf: the batch it belongs to. NULL: itself.
    lock_owner text COLLATE "C",
    reserved_usd numeric(14, 6) NOT NULL DEFAULT 0,
    -- Of earlier attempts, and of this one so far.
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0,
    attempt_cost_usd numeric(14, 6) NOT NULL DEFAULT 0,
    last_category text,
    progress jsonb,
    CONSTRAINT task_live_pkey PRIMARY KEY (id),
    -- What would lose a task or give it to two, were it otherwise. Short, as possible_task: all of what each status means took a fifth
    -- of the server's time for a single submission, and is in tests/strict.sql.
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
    -- Every row is updated a few times and deleted within minutes: clean up by number of rows, not by share of the table.
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
COMMENT ON TABLE lineshaft.task_live IS 'Where each task stands that has not ended. One narrow row, deleted at the end.';

-- Claims: the head of each lane, best first.
CREATE INDEX task_live_claimable ON lineshaft.task_live (generation, lane_id, rank, submission_no)
    WHERE status = 'READY' AND parked IS NULL;
-- The reaper: leases that have run out.
CREATE INDEX task_live_leased ON lineshaft.task_live (lease_until) WHERE lease_until IS NOT NULL;
-- The promoter: back-offs and schedules that are due.
CREATE INDEX task_live_due ON lineshaft.task_live (due_at) WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL;
-- The promoter: deadline boosts that have moved.
CREATE INDEX task_live_rekey ON lineshaft.task_live (rekey_at) WHERE rekey_at IS NOT NULL;
-- Tasks that want a document lock, parked or not, best first in each lane.
CREATE INDEX task_live_wants_lock ON lineshaft.task_live (lock_key, lane_id, rank, submission_no)
    WHERE status = 'READY' AND lock_key IS NOT NULL;
-- The promoter: waiters for a DAG's money of whom it was not told yet that there may never be any.
CREATE INDEX task_live_budget_untold ON lineshaft.task_live (id) WHERE parked = 'dag_budget' AND NOT budget_told;
-- Waiters for a DAG's money, best first.
CREATE INDEX task_live_budget_waiters ON lineshaft.task_live (dag_id, rank, submission_no) WHERE parked = 'dag_budget';


CREATE TABLE lineshaft.task_end (
    ended_at timestamptz NOT NULL,
    ready_at timestamptz,
    claimed_at timestamptz,
    started_at timestamptz,
    first_started_at timestamptz,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    -- A revived task goes on from here, so that no zombie ever matches.
    epoch integer NOT NULL,
    attempts smallint NOT NULL DEFAULT 0,
    revivals smallint NOT NULL DEFAULT 0,
    status lineshaft.task_status NOT NULL,
    id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    model text,
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0,
    -- Why it failed for good, or was cancelled.
    reason text,
    category text,
    output jsonb,
    artifacts jsonb,
    decision_report jsonb,
    -- What the output was said to be when it was handed in; NULL: what the task asked for.
    output_type text,
    CONSTRAINT task_end_pkey PRIMARY KEY (id),
    CONSTRAINT over CHECK (status = ANY ('{COMPLETED,CANCELLED,DEAD_LETTERED}'))
);
COMMENT ON TABLE lineshaft.task_end IS 'How each task ended: its recorded outcome.';
-- Retention, throughput, and what ended last.
CREATE INDEX task_end_by_age ON lineshaft.task_end (ended_at);
-- What ended badly; and it answers at once that no task of a live status is here, so that the view never scans the history for one.
CREATE INDEX task_end_not_completed ON lineshaft.task_end (status, ended_at) WHERE status <> 'COMPLETED';
-- Words in decision reports. ('simple': whatever language they are in, and the same on every server.)
CREATE INDEX task_end_report_words ON lineshaft.task_end USING gin (to_tsvector('pg_catalog.simple'::regconfig, decision_report))
    WHERE decision_report IS NOT NULL;


-- Idempotency: a key in force names its task. It expires at once when the task is cancelled or dead-lettered (U8).
CREATE TABLE lineshaft.task_key (
    key text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    -- Of what was asked: the same key with other content is answered with a flag. Several, one behind the other, after a revival
    -- with another spec.
    content_hash bytea NOT NULL,
    -- NULL: in force for good.
    expires_at timestamptz,
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
    -- Each row is updated once, on no indexed column: with room on its page that leaves the two wide indexes alone.
    fillfactor = 50
);
COMMENT ON TABLE lineshaft.edge IS 'Dependencies: task_id waits for depends_on.';
-- A task ends: who waited for it?
CREATE INDEX edge_dependents ON lineshaft.edge (depends_on, task_id);


-- A DAG of more than one task, or one with a ceiling. A standalone task's DAG is virtual: an id without a row.
CREATE TABLE lineshaft.dag (
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    -- Counters, moved with every end: all tasks, and those that have ended in each way.
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
    -- The ids of its tasks by the keys of the call, to answer a repeated call as the first.
    tasks jsonb NOT NULL,
    CONSTRAINT dag_key_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.dag_key IS 'Idempotency keys of DAGs.';


-- What happened to each claim that ended without success, and the output of one that is being validated. The attempt that
-- succeeded is told by task_end.
CREATE TABLE lineshaft.attempt (
    claimed_at timestamptz NOT NULL,
    started_at timestamptz,
    ended_at timestamptz,
    -- Since when it waits for a gate that runs elsewhere, and when a validator may take it: at once, or when the one that has taken it
    -- is given up for dead. NULL: a person decides.
    gate_since timestamptz,
    gate_due_at timestamptz,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    epoch integer NOT NULL,
    -- How often validators have begun with this gate.
    gate_runs integer NOT NULL DEFAULT 0,
    -- Which of the task's gates it has come to.
    gate_no smallint NOT NULL DEFAULT 0,
    -- Counts from 1 after every revival.
    number smallint NOT NULL,
    revival smallint NOT NULL DEFAULT 0,
    task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    model text,
    outcome text NOT NULL CHECK (
        outcome IN ('validating', 'completed', 'failed', 'rate_limited', 'released', 'waiting', 'cancelled')
    ),
    category text,
    error text,
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0 CHECK (cost_usd >= 0),
    -- {data, artifacts, decision_report}, from the moment it is handed in.
    output jsonb,
    -- The method of the gate that it waits for elsewhere. NULL: none; its agent still holds it.
    gate text COLLATE "C",
    -- Why the last validator came to no verdict.
    gate_error text,
    -- [{gate, method, passed, reasons, score, cost_usd, model, by, at}], one for each gate so far.
    verdicts jsonb,
    CONSTRAINT attempt_pkey PRIMARY KEY (task_id, epoch),
    CONSTRAINT over_unless_validating CHECK ((ended_at IS NULL) = (outcome = 'validating')),
    CONSTRAINT failure_has_a_cause CHECK (outcome <> 'failed' OR (category IS NOT NULL AND error IS NOT NULL))
);
COMMENT ON TABLE lineshaft.attempt IS 'Attempts that failed, were handed back, or are being validated.';
-- Outputs that wait for a gate: validators take them by method ...
CREATE INDEX attempt_gated ON lineshaft.attempt (gate, gate_due_at) WHERE outcome = 'validating' AND gate IS NOT NULL;
-- ... and people see what waits for them, the longest first.
CREATE INDEX attempt_to_approve ON lineshaft.attempt (gate_since, task_id) WHERE outcome = 'validating' AND gate = 'human';
-- What failed lately, and what it cost.
CREATE INDEX attempt_by_age ON lineshaft.attempt (ended_at);


-- Results of durable steps, and the last checkpoint, handed to whoever claims the task next.
CREATE TABLE lineshaft.step (
    recorded_at timestamptz NOT NULL,
    epoch integer NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    cost_usd numeric(14, 6) NOT NULL DEFAULT 0 CHECK (cost_usd >= 0),
    data jsonb,
    CONSTRAINT step_pkey PRIMARY KEY (task_id, name)
);
COMMENT ON TABLE lineshaft.step IS 'Results of durable steps: what ran once is not run again.';

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
    -- Registering again makes a new one; leases belong to it, money belongs to the id.
    incarnation bigint NOT NULL,
    max_concurrent_tasks integer NOT NULL,
    -- Tasks in its hands: moved in the same transaction as they are. Counting rows instead would read every dead index entry
    -- of the agent's past claims.
    held integer NOT NULL DEFAULT 0,
    status lineshaft.agent_status NOT NULL DEFAULT 'active',
    id text COLLATE "C" NOT NULL,
    type text,
    capabilities text[] NOT NULL DEFAULT '{}',
    -- NULL: any type that it is capable of.
    types text[],
    models_available text[] NOT NULL DEFAULT '{}',
    -- NULL: unlimited.
    budget_usd numeric(14, 6),
    spent_usd numeric(14, 6) NOT NULL DEFAULT 0,
    reserved_usd numeric(14, 6) NOT NULL DEFAULT 0,
    -- What it has spent on its last day with a claim or an end, by UTC. The spend of all is the sum over agents: the row is written
    -- anyway, and no two agents wait for each other.
    spent_on_day_usd numeric(14, 6) NOT NULL DEFAULT 0,
    spend_day date,
    -- The idempotency key that its incarnation was registered with, if any.
    registration_key text COLLATE "C",
    CONSTRAINT agent_pkey PRIMARY KEY (id),
    CONSTRAINT possible_agent CHECK (held >= 0 AND reserved_usd >= 0)
) WITH (
    -- Updated with every claim and heartbeat, on no indexed column: leave room for that on the page.
    fillfactor = 50
);
COMMENT ON TABLE lineshaft.agent IS 'Who may claim work, and what each has left to spend.';
-- The daily ceiling: who was active lately. The day changes once a day, so all other updates stay on their page.
CREATE INDEX agent_by_spend_day ON lineshaft.agent (spend_day);
CREATE UNIQUE INDEX agent_registration_key ON lineshaft.agent (registration_key) WHERE registration_key IS NOT NULL;

-- What everything together had cost so far, now and then: the cost-velocity stop compares. No longer than its window.
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
COMMENT ON TABLE lineshaft.day_alert IS 'Days (UTC) on which it was told that the daily budget is used up.';


CREATE TABLE lineshaft.lock (
    token bigint NOT NULL DEFAULT nextval('lineshaft.lock_token'),
    acquired_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    key text COLLATE "C" NOT NULL,
    -- A task, or the batch whose children share it.
    holder_task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    CONSTRAINT lock_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.lock IS 'Document locks that are held.';


CREATE TABLE lineshaft.breaker (
    last_failure timestamptz,
    opened_at timestamptz,
    half_open_at timestamptz,
    -- A probe may be handed out after this. NULL: not by itself.
    probe_at timestamptz,
    failures integer NOT NULL DEFAULT 0,
    state lineshaft.breaker_state NOT NULL DEFAULT 'closed',
    forced boolean NOT NULL DEFAULT false,
    -- A task type, or any other key such as model:x.
    key text COLLATE "C" NOT NULL,
    probe_task_id text COLLATE "C",
    CONSTRAINT breaker_pkey PRIMARY KEY (key),
    CONSTRAINT open_since CHECK (state = 'closed' OR opened_at IS NOT NULL),
    CONSTRAINT half_open_since CHECK (state <> 'half_open' OR half_open_at IS NOT NULL),
    CONSTRAINT probe_only_half_open CHECK (probe_task_id IS NULL OR state = 'half_open'),
    CONSTRAINT forced_is_open CHECK (NOT forced OR state = 'open')
);
COMMENT ON TABLE lineshaft.breaker IS 'Circuit breakers; no row means closed with no failures.';
-- What claims and completions have to look at: nothing, while all goes well.
CREATE INDEX breaker_troubled ON lineshaft.breaker (key) WHERE state <> 'closed' OR failures > 0;


CREATE TABLE lineshaft.slowdown (
    signalled_at timestamptz NOT NULL,
    until timestamptz NOT NULL,
    -- model:NAME; provider:NAME for all models NAME/…; * for all.
    key text COLLATE "C" NOT NULL,
    reason text,
    CONSTRAINT slowdown_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE lineshaft.slowdown IS 'What claims leave alone for a while, after a rate limit. One that was cleared stays, as the latest signal.';


-- The review desk. The history of failures is in attempt.
CREATE TABLE lineshaft.dead_letter (
    dead_lettered_at timestamptz NOT NULL,
    reviewed_at timestamptz,
    epoch integer NOT NULL,
    -- How often it had been revived. Not the epoch: nobody claims a batch, so that it never changes.
    revival smallint NOT NULL DEFAULT 0,
    poison_pill boolean NOT NULL DEFAULT false,
    -- One that was escalated is reviewed, and still waits for a decision.
    reviewed boolean NOT NULL DEFAULT false,
    -- Deleted, as people see it. Nothing is lost.
    hidden boolean NOT NULL DEFAULT false,
    task_id text COLLATE "C" NOT NULL,
    total_cost_usd numeric(14, 6) NOT NULL,
    category text NOT NULL,
    error text NOT NULL,
    -- The error without what differs from one to the next (model/likeness.py).
    pattern text COLLATE "C" NOT NULL,
    -- What was decided last; all decisions are in review.
    resolution text CHECK (resolution IN ('retry', 'modify_and_retry', 'cancel', 'delete', 'escalate')),
    reviewer text,
    note text,
    CONSTRAINT dead_letter_pkey PRIMARY KEY (task_id, revival),
    CONSTRAINT reviewed_with_a_resolution CHECK (
        reviewed = (resolution IS NOT NULL) AND reviewed = (reviewed_at IS NOT NULL)
    )
);
COMMENT ON TABLE lineshaft.dead_letter IS 'Tasks that need a person, and what was decided. Never deleted by itself.';
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
    -- NULL: a retry by hand, past the desk.
    reviewer text,
    note text,
    -- What was asked before a person changed it, and what they changed (model/spec_change.py).
    spec_before jsonb,
    spec_change jsonb,
    CONSTRAINT review_pkey PRIMARY KEY (task_id, no)
);
COMMENT ON TABLE lineshaft.review IS 'What people decided about dead letters, and why.';


-- Where notifications go: one row for each destination that ever was in the operator's file (duties/deliverer.py).
CREATE TABLE lineshaft.destination (
    read_at timestamptz NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Up to where it has read the event feed (store/events.py).
    cursor text NOT NULL,
    CONSTRAINT destination_pkey PRIMARY KEY (name)
);
COMMENT ON TABLE lineshaft.destination IS 'How far each destination of notifications has read the events.';

-- The outbox: what a destination is to be told, until it is delivered, and for some days after.
CREATE TABLE lineshaft.notification (
    id bigint GENERATED ALWAYS AS IDENTITY,
    noted_at timestamptz NOT NULL,
    -- When it is to be sent; while somebody is sending it, when that one is given up for dead.
    due_at timestamptz NOT NULL,
    -- When it was first sent: what throttles count.
    sent_at timestamptz,
    -- Delivered, or given up.
    done_at timestamptz,
    -- Several are told in one message when there are too many; it is named after the first of them.
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
COMMENT ON TABLE lineshaft.notification IS 'What destinations of notifications are told, delivered or not.';
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
    -- sha256 of the token, which itself is shown once and kept nowhere.
    hash bytea NOT NULL,
    CONSTRAINT token_pkey PRIMARY KEY (id),
    CONSTRAINT token_hash UNIQUE (hash)
);
COMMENT ON TABLE lineshaft.token IS 'Bearer tokens of the HTTP API, hashed.';


-- The audit trail, the live feed and the outbox. Sequence numbers commit out of order, so a reader's cursor is a window of
-- transaction snapshots (design: store/events): it needs the transaction id of each row.
CREATE TABLE lineshaft.event (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    at timestamptz NOT NULL DEFAULT now(),
    epoch integer,
    -- What one transaction did to one task is one row: {task.claimed,task.started}. The view events has a row each.
    kinds text[] NOT NULL,
    task_id text COLLATE "C",
    dag_id text COLLATE "C",
    agent_id text COLLATE "C",
    data jsonb
) PARTITION BY RANGE (at);
COMMENT ON TABLE lineshaft.event IS 'Everything that happened, append-only. Partitioned by time.';
-- Both without seq: what has one transaction, or one task, is stored once and is short enough to be sorted.
CREATE INDEX event_feed ON lineshaft.event (xid);
CREATE INDEX event_of_task ON lineshaft.event (task_id) WHERE task_id IS NOT NULL;
-- Old history, page by page. Numbers and places go together, so that a few bytes a page range find them.
CREATE INDEX event_by_seq ON lineshaft.event USING brin (seq) WITH (autosummarize = on);
-- Takes what no other partition takes, so that no transition ever fails for want of one.
CREATE TABLE lineshaft.event_default PARTITION OF lineshaft.event DEFAULT;

-- The highest transaction of any partition that was dropped: a reader that stopped before it has missed something for good. At most
-- one row.
CREATE TABLE lineshaft.event_horizon (
    xid xid8 NOT NULL,
    at timestamptz NOT NULL
);
COMMENT ON TABLE lineshaft.event_horizon IS 'Up to where events were dropped by retention.';

-- What people query.
CREATE VIEW lineshaft.events AS
SELECT event.seq, kind.n, kind.kind, event.at, event.task_id, event.dag_id, event.agent_id, event.epoch, event.data
FROM lineshaft.event
CROSS JOIN LATERAL unnest(event.kinds) WITH ORDINALITY AS kind (kind, n);
COMMENT ON VIEW lineshaft.events IS 'Everything that happened, one row an event: SELECT * FROM lineshaft.events WHERE task_id = … ORDER BY seq, n';


-- Totals for Prometheus, which wants numbers that only grow: counting the history would be slow, and less once some of it is deleted.
CREATE TABLE lineshaft.tally (
    value numeric NOT NULL,
    name text COLLATE "C" NOT NULL,
    labels text[] NOT NULL,
    CONSTRAINT tally_pkey PRIMARY KEY (name, labels)
);
COMMENT ON TABLE lineshaft.tally IS 'Totals of what happened, brought up to date when somebody asks for metrics.';

-- Up to which events they count. One row.
CREATE TABLE lineshaft.tally_place (
    since pg_snapshot NOT NULL
);
COMMENT ON TABLE lineshaft.tally_place IS 'Up to where events are counted in tally.';
INSERT INTO lineshaft.tally_place (since) VALUES ('1:1:');


-- What people query. One row a task, whichever table it lives in.
CREATE VIEW lineshaft.tasks AS
SELECT
    task.id,
    live.status,
    task.type,
    task.title,
    live.priority,
    live.rank - lane.boost_per_minute * lineshaft.minutes(now()) AS effective_priority,
    task.dag_id,
    task.parent_id,
    task.idempotency_key,
    live.agent_id,
    live.model,
    live.epoch,
    live.attempts,
    task.max_attempts,
    live.blocked,
    live.parked,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id ORDER BY edge.depends_on) AS depends_on,
    ARRAY(
        SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id AND NOT edge.satisfied ORDER BY edge.depends_on
    ) AS blocked_by,
    task.lock_key,
    (live.cost_usd + live.attempt_cost_usd)::numeric(14, 6) AS cost_usd,
    task.max_cost_usd,
    live.reserved_usd,
    live.tokens_input,
    live.tokens_output,
    task.deadline,
    CASE WHEN live.status = 'PENDING' THEN coalesce(live.due_at, task.run_at) ELSE task.run_at END AS run_at,
    CASE WHEN live.status = 'RETRYING' THEN live.due_at END AS retry_at,
    task.created_at,
    live.ready_at,
    live.claimed_at,
    live.started_at,
    live.heartbeat_at,
    live.lease_until,
    NULL::timestamptz AS ended_at,
    live.last_category AS category,
    NULL::text AS reason,
    live.progress,
    task.spec,
    NULL::jsonb AS output,
    task.tags,
    task.created_by
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
JOIN lineshaft.lane ON lane.id = live.lane_id
UNION ALL
SELECT
    task.id,
    ended.status,
    task.type,
    task.title,
    task.priority,
    NULL::double precision,
    task.dag_id,
    task.parent_id,
    task.idempotency_key,
    ended.agent_id,
    ended.model,
    ended.epoch,
    ended.attempts,
    task.max_attempts,
    0,
    NULL::text,
    ARRAY(SELECT edge.depends_on FROM lineshaft.edge WHERE edge.task_id = task.id ORDER BY edge.depends_on),
    '{}'::text[] COLLATE "C",
    task.lock_key,
    ended.cost_usd,
    task.max_cost_usd,
    0::numeric(14, 6),
    ended.tokens_input,
    ended.tokens_output,
    task.deadline,
    task.run_at,
    NULL::timestamptz,
    task.created_at,
    ended.ready_at,
    ended.claimed_at,
    ended.started_at,
    NULL::timestamptz,
    NULL::timestamptz,
    ended.ended_at,
    ended.category,
    ended.reason,
    NULL::jsonb,
    task.spec,
    ended.output,
    task.tags,
    task.created_by
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id;
COMMENT ON VIEW lineshaft.tasks IS 'Every task: SELECT * FROM lineshaft.tasks WHERE status = ''RUNNING''';
