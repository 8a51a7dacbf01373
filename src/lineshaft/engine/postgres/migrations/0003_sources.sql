-- Sources: rules that create work when something happens, and what became of it.

-- Versions of sources: never used twice, so that a source that is created again isn't taken for the deleted one.
CREATE SEQUENCE lineshaft.source_version AS bigint CACHE 1;

CREATE TABLE lineshaft.source (
    id bigint GENERATED ALWAYS AS IDENTITY,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    -- Of an enabled schedule: the next tick, and when it fires, which is later by its jitter.
    next_tick timestamptz,
    next_at timestamptz,
    -- Grows with each change: a change that names the version it is based on is refused if there is a newer one.
    version bigint NOT NULL DEFAULT nextval('lineshaft.source_version'),
    -- Paused by hand: stays so when a file is applied.
    paused boolean NOT NULL DEFAULT false,
    name text COLLATE "C" NOT NULL,
    -- Of an enabled event source: its place in the event feed (feed/events.py).
    cursor text COLLATE "C",
    kind text COLLATE "C" NOT NULL,
    origin text COLLATE "C" NOT NULL,
    -- Complete, with defaults.
    definition jsonb NOT NULL,
    -- As a file or an agent last gave it: the same again changes nothing.
    applied jsonb,
    updated_by text,
    CONSTRAINT source_pkey PRIMARY KEY (id),
    CONSTRAINT source_name UNIQUE (name),
    CONSTRAINT tick_has_time CHECK ((next_tick IS NULL) = (next_at IS NULL))
);
COMMENT ON TABLE lineshaft.source IS 'Sources: schedules, webhooks and other rules that create work.';
COMMENT ON COLUMN lineshaft.source.id IS 'A source that is deleted and created again has another id.';
COMMENT ON COLUMN lineshaft.source.created_at IS 'When it was created; every_sec counts from here.';
COMMENT ON COLUMN lineshaft.source.updated_at IS 'When its definition was last changed.';
COMMENT ON COLUMN lineshaft.source.version IS 'Grows with each change, and is never used twice.';
COMMENT ON COLUMN lineshaft.source.next_tick IS 'Of an enabled schedule: its next tick.';
COMMENT ON COLUMN lineshaft.source.next_at IS 'When that tick fires: with its jitter.';
COMMENT ON COLUMN lineshaft.source.paused IS 'It was paused by hand.';
COMMENT ON COLUMN lineshaft.source.name IS 'Its name.';
COMMENT ON COLUMN lineshaft.source.cursor IS 'Of an enabled event source: its place in the event feed.';
COMMENT ON COLUMN lineshaft.source.kind IS 'schedule, webhook, files, event or observer.';
COMMENT ON COLUMN lineshaft.source.origin IS 'Where it came from: api, agent or file:NAME.';
COMMENT ON COLUMN lineshaft.source.definition IS 'What it does, with all defaults.';
COMMENT ON COLUMN lineshaft.source.updated_by IS 'The person or token that last changed it by hand; NULL: none did, or unknown.';
COMMENT ON COLUMN lineshaft.source.applied IS 'The definition that a file or an agent last gave; NULL: none did.';
-- The scheduler reads due schedules only, however many there are.
CREATE INDEX source_due ON lineshaft.source (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX source_of_events ON lineshaft.source (name) WHERE cursor IS NOT NULL;
CREATE INDEX source_of_observers ON lineshaft.source (name) WHERE kind = 'observer' AND NOT paused;
CREATE INDEX source_of_files ON lineshaft.source (name) WHERE kind = 'files' AND NOT paused;
CREATE INDEX source_of_origin ON lineshaft.source (origin, name);

CREATE TABLE lineshaft.firing (
    id bigint GENERATED ALWAYS AS IDENTITY,
    source_id bigint NOT NULL,
    at timestamptz NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    task_ids text[] NOT NULL DEFAULT '{}',
    dag_id text COLLATE "C",
    error text,
    -- No index begins with id: a list of a source that seldom fires would read all others to find its own.
    CONSTRAINT firing_pkey PRIMARY KEY (source_id, id)
);
COMMENT ON TABLE lineshaft.firing IS 'History of sources: what became of each tick, delivery or event.';
COMMENT ON COLUMN lineshaft.firing.id IS 'In order of time.';
COMMENT ON COLUMN lineshaft.firing.source_id IS 'The source.';
COMMENT ON COLUMN lineshaft.firing.at IS 'When it fired.';
COMMENT ON COLUMN lineshaft.firing.outcome IS 'created, duplicate, filtered, skipped or failed.';
COMMENT ON COLUMN lineshaft.firing.task_ids IS 'Tasks that it created, or the existing ones.';
COMMENT ON COLUMN lineshaft.firing.dag_id IS 'The DAG that it created, or the existing one.';
COMMENT ON COLUMN lineshaft.firing.error IS 'Why nothing was created.';
CREATE INDEX firing_by_age ON lineshaft.firing (at);

-- Totals, which retention doesn't delete.
CREATE TABLE lineshaft.source_tally (
    source_id bigint NOT NULL,
    firings bigint NOT NULL,
    last_at timestamptz NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    CONSTRAINT source_tally_pkey PRIMARY KEY (source_id, outcome)
) WITH (fillfactor = 50);
COMMENT ON TABLE lineshaft.source_tally IS 'Firings of each source by outcome.';
COMMENT ON COLUMN lineshaft.source_tally.source_id IS 'The source.';
COMMENT ON COLUMN lineshaft.source_tally.outcome IS 'As in firing.';
COMMENT ON COLUMN lineshaft.source_tally.firings IS 'How often.';
COMMENT ON COLUMN lineshaft.source_tally.last_at IS 'The last time.';

-- What has fired: the first transaction that inserts a key owns it.
CREATE TABLE lineshaft.source_key (
    source_id bigint NOT NULL,
    expires_at timestamptz,
    key text COLLATE "C" NOT NULL,
    CONSTRAINT source_key_pkey PRIMARY KEY (source_id, key)
);
COMMENT ON TABLE lineshaft.source_key IS 'Ticks, deliveries and events that have fired.';
COMMENT ON COLUMN lineshaft.source_key.source_id IS 'The source.';
COMMENT ON COLUMN lineshaft.source_key.key IS 'The tick, delivery id, digest or rendered key.';
COMMENT ON COLUMN lineshaft.source_key.expires_at IS 'When it may fire again; NULL: never.';
CREATE INDEX source_key_expiry ON lineshaft.source_key (expires_at) WHERE expires_at IS NOT NULL;

-- Work of sources: a task or a whole DAG per firing.
CREATE TABLE lineshaft.source_work (
    source_id bigint NOT NULL,
    created_at timestamptz NOT NULL,
    -- How many event sources led to it, one after another.
    depth smallint NOT NULL DEFAULT 0,
    is_task boolean NOT NULL,
    -- Cleared after it has ended, when somebody looks.
    is_open boolean NOT NULL DEFAULT true,
    id text COLLATE "C" NOT NULL,
    dag_id text COLLATE "C" NOT NULL,
    CONSTRAINT source_work_pkey PRIMARY KEY (id)
) WITH (fillfactor = 70);
COMMENT ON TABLE lineshaft.source_work IS 'Tasks and DAGs that sources created.';
COMMENT ON COLUMN lineshaft.source_work.source_id IS 'The source.';
COMMENT ON COLUMN lineshaft.source_work.created_at IS 'When it was created.';
COMMENT ON COLUMN lineshaft.source_work.depth IS 'How many event sources led to it, one after another.';
COMMENT ON COLUMN lineshaft.source_work.is_task IS 'It is a task; otherwise a DAG.';
COMMENT ON COLUMN lineshaft.source_work.is_open IS 'It has not been seen to have ended.';
COMMENT ON COLUMN lineshaft.source_work.id IS 'The task or DAG.';
COMMENT ON COLUMN lineshaft.source_work.dag_id IS 'The DAG, also of a task.';
CREATE INDEX source_work_open ON lineshaft.source_work (source_id, created_at, id) WHERE is_open;
CREATE INDEX source_work_of_dag ON lineshaft.source_work (dag_id);
CREATE INDEX source_work_by_age ON lineshaft.source_work (created_at);

-- What watchers of files have seen: changes that were made while none ran are found at the next start.
CREATE TABLE lineshaft.file_seen (
    source_id bigint NOT NULL,
    seen_at timestamptz NOT NULL,
    watcher text COLLATE "C" NOT NULL,
    path text COLLATE "C" NOT NULL,
    digest text COLLATE "C" NOT NULL,
    CONSTRAINT file_seen_pkey PRIMARY KEY (source_id, watcher, path)
);
COMMENT ON TABLE lineshaft.file_seen IS 'Files that watchers have seen.';
COMMENT ON COLUMN lineshaft.file_seen.source_id IS 'The source.';
COMMENT ON COLUMN lineshaft.file_seen.seen_at IS 'When this content was first seen.';
COMMENT ON COLUMN lineshaft.file_seen.watcher IS 'The name of the watcher.';
COMMENT ON COLUMN lineshaft.file_seen.path IS 'Relative to the root of the source.';
COMMENT ON COLUMN lineshaft.file_seen.digest IS 'SHA-256 of the content.';
