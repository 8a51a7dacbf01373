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
-- Sources by source_of_token.
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd,
    ARRAY (
        SELECT source.name FROM lineshaft.source WHERE source.token_id = token.id AND NOT source.paused
        ORDER BY source.name LIMIT 100
    ) AS sources
FROM lineshaft.token ORDER BY created_at, id

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

-- name: pause_sources
-- As a pause by hand does (sources/registry.py), in the transaction that revokes their tokens. By source_of_token.
WITH paused AS (
    UPDATE lineshaft.source
    SET paused = true, next_tick = NULL, next_at = NULL, cursor = NULL, version = nextval('lineshaft.source_version'),
        updated_at = coalesce(%(now)s::timestamptz, now()), updated_by = %(actor)s::text
    WHERE token_id = ANY (%(token_ids)s::text[]) AND NOT paused
    RETURNING name
)
INSERT INTO lineshaft.event (at, kinds, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{source.changed}',
    jsonb_build_object('source', name, 'fields', jsonb_build_array('enabled'), 'enabled', false) || %(act)s::jsonb
FROM paused

-- name: find_token
-- For every request with a token: one look-up in token_hash.
SELECT id, name, scope, created_at, revoked_at, agent_id, budget_usd FROM lineshaft.token WHERE hash = %(hash)s::bytea AND revoked_at IS NULL

-- name: any_token
SELECT EXISTS (SELECT FROM lineshaft.token WHERE revoked_at IS NULL)

-- name: any_token_ever
SELECT EXISTS (SELECT FROM lineshaft.token)
