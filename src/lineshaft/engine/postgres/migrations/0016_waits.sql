-- Waiting without a slot: a running task sleeps, or waits for a signal, as a step.

CREATE TABLE lineshaft.wait (
    until timestamptz,
    -- Of the claim that last began it. While the task is PENDING with this epoch, it is in this wait.
    epoch integer NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    signal text COLLATE "C",
    CONSTRAINT wait_pkey PRIMARY KEY (task_id, name),
    CONSTRAINT sleep_has_an_end CHECK (signal IS NOT NULL OR until IS NOT NULL)
);
COMMENT ON TABLE lineshaft.wait IS 'Sleeps and waits for signals that tasks have begun and whose step isn''t recorded yet.';
COMMENT ON COLUMN lineshaft.wait.until IS 'When it ends at the latest; null: never without the signal.';
COMMENT ON COLUMN lineshaft.wait.epoch IS 'The claim that last began it.';
COMMENT ON COLUMN lineshaft.wait.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.wait.name IS 'The name of its step.';
COMMENT ON COLUMN lineshaft.wait.signal IS 'The signal that it waits for; null: it only sleeps.';

-- A signal is kept after it was received, without its data: a repeated call with its key must not send it again.
CREATE TABLE lineshaft.signal (
    no bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL,
    received_at timestamptz,
    task_id text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    key text COLLATE "C",
    sender text,
    data jsonb,
    CONSTRAINT signal_pkey PRIMARY KEY (task_id, no)
);
COMMENT ON TABLE lineshaft.signal IS 'Signals to tasks.';
COMMENT ON COLUMN lineshaft.signal.no IS 'Counts upwards.';
COMMENT ON COLUMN lineshaft.signal.at IS 'When it was sent.';
COMMENT ON COLUMN lineshaft.signal.received_at IS 'When a step of the task recorded it; null: it waits.';
COMMENT ON COLUMN lineshaft.signal.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.signal.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.signal.name IS 'Its name.';
COMMENT ON COLUMN lineshaft.signal.key IS 'Its idempotency key.';
COMMENT ON COLUMN lineshaft.signal.sender IS 'Who sent it; null: unknown.';
COMMENT ON COLUMN lineshaft.signal.data IS 'Its data, until it is received.';
CREATE INDEX signal_unreceived ON lineshaft.signal (task_id, no) WHERE received_at IS NULL;
CREATE UNIQUE INDEX signal_key ON lineshaft.signal (task_id, key) WHERE key IS NOT NULL;
