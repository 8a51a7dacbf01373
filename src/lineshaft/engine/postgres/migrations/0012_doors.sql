-- Who opened a session and who put a source, so that neither outlives or leaves what it belongs to; and who watches files.

ALTER TABLE lineshaft.session ADD COLUMN account bigint;
COMMENT ON COLUMN lineshaft.session.account IS 'The user id of the browser, on the machine of the server; NULL: it came from elsewhere, or over HTTPS.';

ALTER TABLE lineshaft.source ADD COLUMN token_id text COLLATE "C";
COMMENT ON COLUMN lineshaft.source.token_id IS 'The token that last put or changed it; NULL: none was used.';
-- Revoking a token and listing tokens look for their sources.
CREATE INDEX source_of_token ON lineshaft.source (token_id, name) WHERE token_id IS NOT NULL;

-- Who has looked at folders of file sources, and what was wrong with them.
CREATE TABLE lineshaft.file_watcher (
    looked_at timestamptz NOT NULL,
    name text COLLATE "C" NOT NULL,
    folders text[] NOT NULL,
    faults jsonb NOT NULL,
    CONSTRAINT file_watcher_pkey PRIMARY KEY (name)
);
COMMENT ON TABLE lineshaft.file_watcher IS 'Watchers of file sources.';
COMMENT ON COLUMN lineshaft.file_watcher.looked_at IS 'When it last looked, to some seconds.';
COMMENT ON COLUMN lineshaft.file_watcher.name IS 'Its name: server, or that of lineshaft watch.';
COMMENT ON COLUMN lineshaft.file_watcher.folders IS 'The folders that it may watch.';
COMMENT ON COLUMN lineshaft.file_watcher.faults IS 'By source: why it doesn''t watch its root.';
