-- Limits that people set by hand, what the settings of running servers say, and looks at the cost velocity between two samples.

-- Processes lock the samples before the limits.
ALTER TABLE lineshaft.spend_sample ADD COLUMN day_usd numeric(20, 6);
COMMENT ON COLUMN lineshaft.spend_sample.day_usd IS 'Money booked on its UTC day until then; NULL: unknown.';

ALTER TABLE lineshaft.limits ADD COLUMN by_hand jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN lineshaft.limits.by_hand IS 'Limits that a person has set, by name: the value, and the setting that was last applied then.';

CREATE TABLE lineshaft.server (
    started_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version text COLLATE "C" NOT NULL,
    limits jsonb NOT NULL,
    CONSTRAINT server_pkey PRIMARY KEY (id)
) WITH (fillfactor = 50);
COMMENT ON TABLE lineshaft.server IS 'Servers that run, with the limits in their settings.';
COMMENT ON COLUMN lineshaft.server.started_at IS 'When it started.';
COMMENT ON COLUMN lineshaft.server.seen_at IS 'When it last reported that it runs.';
COMMENT ON COLUMN lineshaft.server.id IS 'The process.';
COMMENT ON COLUMN lineshaft.server.name IS 'Host and port.';
COMMENT ON COLUMN lineshaft.server.version IS 'The version of Lineshaft.';
COMMENT ON COLUMN lineshaft.server.limits IS 'Limits in its settings, by name.';
