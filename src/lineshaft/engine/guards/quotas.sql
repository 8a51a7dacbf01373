-- Quotas: rows that limit how many tasks of a key are held, or how many are claimed in a time.

-- name: lock_quotas
-- Changes take turns, so that limits.quota_kinds says what the quotas say.
SELECT FROM lineshaft.limits FOR NO KEY UPDATE

-- name: write_quota
INSERT INTO lineshaft.quota AS known (
    name, match, shares_limit, max_running, max_waiting, rate_amount, rate_unit, rate_per_sec, weight, changed_at
)
VALUES (
    %(name)s::text, %(match)s::text, NOT %(each)s::boolean, %(max_running)s::integer, %(max_waiting)s::integer, %(rate_amount)s::numeric,
    %(rate_unit)s::text, %(rate_per_sec)s::double precision, %(weight)s::double precision, coalesce(%(now)s::timestamptz, now())
)
ON CONFLICT (name) DO UPDATE
SET match = excluded.match, shares_limit = excluded.shares_limit, max_running = excluded.max_running, max_waiting = excluded.max_waiting,
    rate_amount = excluded.rate_amount, rate_unit = excluded.rate_unit, rate_per_sec = excluded.rate_per_sec, weight = excluded.weight,
    changed_at = excluded.changed_at

-- name: delete_quota
DELETE FROM lineshaft.quota WHERE name = %(name)s::text RETURNING name

-- name: write_kinds
-- Only what quotas say: another bit says that there are tasks with a fair_key.
UPDATE lineshaft.limits
SET quota_kinds = quota_kinds & ~191 | coalesce((
    SELECT bit_or(
        CASE WHEN lineshaft.gates_claims_1(max_running, rate_unit) THEN lineshaft.quota_kind_1(match) ELSE 0 END
        | CASE WHEN max_waiting IS NOT NULL THEN 128 ELSE 0 END
    )
    FROM lineshaft.quota
), 0)

-- name: log_quota
INSERT INTO lineshaft.event (at, kinds, data)
VALUES (coalesce(%(now)s::timestamptz, now()), '{quota.changed}', %(data)s::jsonb)

-- name: quotas
-- Slots count while their claim holds the task.
SELECT quota.name, quota.match, NOT quota.shares_limit AS each, quota.max_running, quota.max_waiting, quota.rate_amount, quota.rate_unit,
    quota.rate_per_sec, quota.weight, quota.changed_at, live.running, live.holders,
    (
        SELECT count(*) FROM (
            SELECT FROM lineshaft.task_live AS parked
            WHERE parked.parked_key >= quota.name || chr(31) AND parked.parked_key < quota.name || chr(32)
            LIMIT %(most)s::integer
        ) AS waiter
    )::integer AS waiting,
    coalesce((
        SELECT max(of_key.used) FROM (
            SELECT sum(quota_use.amount) AS used FROM lineshaft.quota_use
            WHERE quota_use.quota = quota.name
              AND quota_use.part >= lineshaft.part_1(coalesce(%(now)s::timestamptz, now()), quota.rate_per_sec) - 60
            GROUP BY quota_use.key
        ) AS of_key
    ), 0) AS used
FROM lineshaft.quota
CROSS JOIN LATERAL (
    SELECT count(*)::integer AS running,
        coalesce(jsonb_agg(jsonb_build_object(
            'task_id', held.task_id, 'key', nullif(held.key, ''), 'agent_id', held.agent_id, 'since', lineshaft.iso(held.taken_at)
        ) ORDER BY held.taken_at, held.task_id) FILTER (WHERE held.place <= %(holders)s::integer), '[]') AS holders
    FROM (
        SELECT slot.task_id, CASE WHEN quota.shares_limit THEN '' ELSE slot.key END AS key, slot.taken_at, holder.agent_id,
            row_number() OVER (ORDER BY slot.taken_at, slot.task_id) AS place
        FROM lineshaft.slot
        JOIN lineshaft.task_live AS holder ON holder.id = slot.task_id
        WHERE slot.quota = quota.name AND holder.epoch = slot.epoch AND holder.lease_until IS NOT NULL
    ) AS held
) AS live
WHERE (%(after)s::text IS NULL OR quota.name > %(after)s::text) AND (%(name)s::text IS NULL OR quota.name = %(name)s::text)
ORDER BY quota.name
LIMIT %(limit)s::integer
