-- Artifacts: files that tasks read and write. Their bytes are in the artifact store, under their SHA-256.

-- The store that belongs to this database. At most one row, written before the first artifact.
CREATE TABLE lineshaft.artifact_store (
    id text NOT NULL,
    -- As the process that wrote the row named it.
    place text NOT NULL,
    only_row boolean NOT NULL DEFAULT true CHECK (only_row),
    CONSTRAINT artifact_store_pkey PRIMARY KEY (only_row)
);
COMMENT ON TABLE lineshaft.artifact_store IS 'The artifact store of this database.';
COMMENT ON COLUMN lineshaft.artifact_store.id IS 'Its id, which the store itself has too.';
COMMENT ON COLUMN lineshaft.artifact_store.place IS 'Where it was when it was first used, for messages.';
COMMENT ON COLUMN lineshaft.artifact_store.only_row IS 'Keeps the table at one row.';

-- One row for each content of the store, however many artifacts have it. The row is locked by uploads, which rely on the object, and by
-- the janitor, which deletes it. Lock order: contents by sha256, then artifacts by id.
CREATE TABLE lineshaft.content (
    -- When an upload last used it.
    used_at timestamptz NOT NULL,
    -- The janitor is deleting the object: an upload must write it again.
    deleted_at timestamptz,
    size bigint NOT NULL CHECK (size >= 0),
    -- The object exists and has an artifact; false: an upload is writing it, or was cut off.
    stored boolean NOT NULL DEFAULT false,
    sha256 text COLLATE "C" NOT NULL,
    CONSTRAINT content_pkey PRIMARY KEY (sha256),
    CONSTRAINT deleted_is_not_stored CHECK (deleted_at IS NULL OR NOT stored)
);
COMMENT ON TABLE lineshaft.content IS 'Contents of the artifact store, one row for each.';
COMMENT ON COLUMN lineshaft.content.used_at IS 'When an upload last used it.';
COMMENT ON COLUMN lineshaft.content.deleted_at IS 'Since when the janitor is deleting the object; NULL: it is not.';
COMMENT ON COLUMN lineshaft.content.size IS 'Bytes.';
COMMENT ON COLUMN lineshaft.content.stored IS 'Whether the object exists and has an artifact; false: an upload is writing it, or was cut off.';
COMMENT ON COLUMN lineshaft.content.sha256 IS 'Its SHA-256 in hexadecimal digits, which is also its key in the store.';
-- Deletions that were cut off, and uploads that were.
CREATE INDEX content_unfinished ON lineshaft.content (deleted_at, used_at) WHERE NOT stored;

CREATE TABLE lineshaft.artifact (
    created_at timestamptz NOT NULL,
    -- When it was last uploaded: a repeated attempt gets the same artifact again.
    used_at timestamptz NOT NULL,
    size bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    sha256 text COLLATE "C" NOT NULL,
    name text NOT NULL,
    content_type text NOT NULL,
    -- The task that made it; NULL: none. It may have been deleted since.
    task_id text COLLATE "C",
    CONSTRAINT artifact_pkey PRIMARY KEY (id)
);
COMMENT ON TABLE lineshaft.artifact IS 'Files that tasks read and write.';
COMMENT ON COLUMN lineshaft.artifact.created_at IS 'When it was first uploaded.';
COMMENT ON COLUMN lineshaft.artifact.used_at IS 'When it was last uploaded.';
COMMENT ON COLUMN lineshaft.artifact.size IS 'Bytes.';
COMMENT ON COLUMN lineshaft.artifact.id IS 'Its id.';
COMMENT ON COLUMN lineshaft.artifact.sha256 IS 'The SHA-256 of its content.';
COMMENT ON COLUMN lineshaft.artifact.name IS 'The name of the file, as its uploader gave it. Never used as a path.';
COMMENT ON COLUMN lineshaft.artifact.content_type IS 'Its media type, as its uploader gave it.';
COMMENT ON COLUMN lineshaft.artifact.task_id IS 'The task that made it; NULL: none.';
-- A repeated attempt that makes the same file gets the same artifact. The name as a digest: an index entry has a limit.
CREATE UNIQUE INDEX artifact_of_task ON lineshaft.artifact (task_id, sha256, md5(name)) WHERE task_id IS NOT NULL;
CREATE INDEX artifact_of_content ON lineshaft.artifact (sha256);
CREATE INDEX artifact_by_use ON lineshaft.artifact (used_at, id);

-- Which tasks refer to which artifacts: as inputs, outputs, or in place of large data.
CREATE TABLE lineshaft.artifact_ref (
    task_id text COLLATE "C" NOT NULL,
    artifact_id text COLLATE "C" NOT NULL,
    CONSTRAINT artifact_ref_pkey PRIMARY KEY (task_id, artifact_id)
);
COMMENT ON TABLE lineshaft.artifact_ref IS 'Artifacts that tasks refer to; they are kept as long as the task.';
COMMENT ON COLUMN lineshaft.artifact_ref.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.artifact_ref.artifact_id IS 'The artifact.';
CREATE INDEX artifact_ref_by_artifact ON lineshaft.artifact_ref (artifact_id);
