-- name: write_row
-- Rolled back. A row of a token that is not valid.
INSERT INTO lineshaft.token (id, name, scope, hash, created_at, revoked_at)
VALUES ('token_' || gen_random_uuid()::text, 'probe', 'read', sha256(gen_random_uuid()::text::bytea), now(), now())

-- name: little_memory
-- So that the next statement needs a file.
SET LOCAL work_mem = '64kB'

-- name: write_file
-- A sort of about a megabyte writes to the disk at once. The row may fit into a page that exists.
SELECT max(place) FROM (SELECT row_number() OVER (ORDER BY md5(n::text)) AS place FROM generate_series(1, 10000) AS n) AS sorted
