-- name: insert_token
INSERT INTO lineshaft.token (id, name, scope, hash, created_at, agent_id, budget_usd)
VALUES (
    %(id)s::text, %(name)s::text, %(scope)s::text, %(hash)s::bytea, coalesce(%(now)s::timestamptz, now()), %(agent_id)s::text,
    %(budget_usd)s::numeric
)
RETURNING id, name, scope, created_at, revoked_at, agent_id, budget_usd

-- name: list_tokens
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM lineshaft.token ORDER BY created_at, id

-- name: revoke_token
-- By id, or all valid ones with this name. Revoking again keeps the first time.
UPDATE lineshaft.token
SET revoked_at = coalesce(revoked_at, %(now)s::timestamptz, now())
WHERE id = %(which)s::text OR (name = %(which)s::text AND revoked_at IS NULL)
RETURNING id, name, scope, created_at, revoked_at, agent_id, budget_usd

-- name: find_token
-- For every request with a token: one look-up in token_hash.
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM lineshaft.token WHERE hash = %(hash)s::bytea AND revoked_at IS NULL

-- name: any_token
SELECT EXISTS (SELECT FROM lineshaft.token WHERE revoked_at IS NULL)

-- name: any_token_ever
SELECT EXISTS (SELECT FROM lineshaft.token)
