-- name: read_claim_key
SELECT (SELECT key FROM lineshaft.claim_key)

-- name: create_claim_key
-- Waits for another process that creates it.
INSERT INTO lineshaft.claim_key (key) VALUES (%(key)s::bytea) ON CONFLICT DO NOTHING
