-- name: insert_session
INSERT INTO lineshaft.session (hash, token_id, name, account, created_at, used_at)
VALUES (
    %(hash)s::bytea, %(token_id)s::text, %(name)s::text, %(account)s::bigint, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
)

-- name: find_session
-- For every page: one look-up by primary key in each table.
SELECT session.name, session.token_id, session.used_at, token.scope, token.agent_id, token.budget_usd, session.account,
    coalesce(%(now)s::timestamptz, now()) AS now
FROM lineshaft.session
LEFT JOIN lineshaft.token ON token.id = session.token_id
WHERE session.hash = %(hash)s::bytea
  AND session.used_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(idle_sec)s)
  AND session.created_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(longest_sec)s)
  AND (session.token_id IS NULL OR token.revoked_at IS NULL AND token.id IS NOT NULL)

-- name: use_session
UPDATE lineshaft.session SET used_at = coalesce(%(now)s::timestamptz, now()) WHERE hash = %(hash)s::bytea

-- name: delete_session
DELETE FROM lineshaft.session WHERE hash = %(hash)s::bytea

-- name: delete_ended_sessions
-- A session that is in use all the time is refused after its longest time, and then no longer used.
DELETE FROM lineshaft.session
WHERE hash IN (
    SELECT hash FROM lineshaft.session
    WHERE used_at < coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(idle_sec)s)
    ORDER BY used_at LIMIT %(limit)s::integer
)
RETURNING true
