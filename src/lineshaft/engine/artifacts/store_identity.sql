-- name: read_store
SELECT id, place FROM lineshaft.artifact_store

-- name: insert_store
-- Until the transaction ends, other processes wait here.
INSERT INTO lineshaft.artifact_store (id, place) VALUES (%(id)s::text, %(place)s::text) ON CONFLICT DO NOTHING RETURNING id
