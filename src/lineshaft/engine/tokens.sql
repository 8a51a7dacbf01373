-- fragment: token_data
        jsonb_strip_nulls(jsonb_build_object('token_id', id, 'name', name, 'scope', scope, 'agent_id', agent_id)) || %(act)s::jsonb

-- name: insert_token
WITH made AS (
    INSERT INTO lineshaft.token (id, name, scope, hash, created_at, agent_id, budget_usd)
    VALUES (
        %(id)s::text, %(name)s::text, %(scope)s::text, %(hash)s::bytea, coalesce(%(now)s::timestamptz, now()), %(agent_id)s::text,
        %(budget_usd)s::numeric
    )
    RETURNING id, name, scope, created_at, revoked_at, agent_id, budget_usd
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT created_at, '{token.created}',
        -- include: token_data
    FROM made
)
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM made

-- name: list_tokens
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM lineshaft.token ORDER BY created_at, id

-- name: revoke_token
-- By id, or all valid ones with this name. Revoking again keeps the first time.
WITH wanted AS MATERIALIZED (
    SELECT id, revoked_at IS NULL AS is_valid FROM lineshaft.token
    WHERE id = %(which)s::text OR (name = %(which)s::text AND revoked_at IS NULL)
    ORDER BY id
    FOR UPDATE
),
revoked AS (
    UPDATE lineshaft.token
    SET revoked_at = coalesce(revoked_at, %(now)s::timestamptz, now())
    FROM wanted
    WHERE token.id = wanted.id
    RETURNING token.id, name, scope, created_at, revoked_at, agent_id, budget_usd, wanted.is_valid
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, data)
    SELECT revoked_at, '{token.revoked}',
        -- include: token_data
    FROM revoked WHERE is_valid
)
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM revoked

-- name: find_token
-- For every request with a token: one look-up in token_hash.
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM lineshaft.token WHERE hash = %(hash)s::bytea AND revoked_at IS NULL

-- name: any_token
SELECT EXISTS (SELECT FROM lineshaft.token WHERE revoked_at IS NULL)

-- name: any_token_ever
SELECT EXISTS (SELECT FROM lineshaft.token)
