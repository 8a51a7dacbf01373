-- Quotas: rows that limit how many tasks of a key are held, or how many are claimed in a time.

-- name: lock_quotas
-- Changes take turns, so that limits.quota_kinds says what the quotas say.
SELECT FROM lineshaft.limits FOR NO KEY UPDATE

-- name: forget_counts
-- What a quota has counted, if it counts in another way from now on: slots that are given again, and the use of its rate, which is kept where only
-- the length of the window changes.
WITH known AS MATERIALIZED (
    SELECT name, rate_per_sec,
        match <> %(match)s::text OR shares_limit = %(each)s::boolean AS counts_others,
        rate_unit IS DISTINCT FROM %(rate_unit)s::text AS has_other_unit, rate_per_sec IS DISTINCT FROM %(rate_per_sec)s::double precision AS has_other_window
    FROM lineshaft.quota WHERE name = %(name)s::text
),
slots AS (DELETE FROM lineshaft.slot USING known WHERE slot.quota = known.name AND known.counts_others),
uses AS (
    DELETE FROM lineshaft.quota_use USING known
    WHERE quota_use.quota = known.name AND (known.counts_others OR known.has_other_unit OR known.has_other_window)
    RETURNING quota_use.quota, quota_use.key, quota_use.amount, quota_use.part,
        CASE WHEN NOT known.counts_others AND NOT known.has_other_unit THEN known.rate_per_sec END AS per_sec
)
SELECT quota, key, lineshaft.part_1(to_timestamp((part + 1) * (per_sec / 60)), %(rate_per_sec)s::double precision) AS part, sum(amount) AS amount
FROM uses WHERE per_sec IS NOT NULL GROUP BY 1, 2, 3

-- name: keep_uses
INSERT INTO lineshaft.quota_use (quota, key, part, amount)
SELECT kept.quota, kept.key, kept.part, kept.amount
FROM unnest(%(quotas)s::text[], %(keys)s::text[], %(parts)s::bigint[], %(amounts)s::numeric[]) AS kept (quota, key, part, amount)
ON CONFLICT (quota, key, part) DO UPDATE SET amount = quota_use.amount + excluded.amount

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
WITH slots AS (DELETE FROM lineshaft.slot WHERE quota = %(name)s::text),
uses AS (DELETE FROM lineshaft.quota_use WHERE quota = %(name)s::text)
DELETE FROM lineshaft.quota WHERE name = %(name)s::text RETURNING name

-- name: give_slots
-- Tasks that are held already count: those of one quota, or of all that were set within some seconds.
SELECT lineshaft.give_slots_1(%(name)s::text, coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(within_sec)s::double precision))

-- name: mark_held
-- So that the ends of these claims release their slots at once. A duty finds the slots of rows that are locked now.
UPDATE lineshaft.task_live AS live SET has_slots = true
WHERE live.id = ANY (ARRAY(
    SELECT held.id
    FROM lineshaft.slot
    JOIN lineshaft.quota ON quota.name = slot.quota
    JOIN lineshaft.task_live AS held ON held.id = slot.task_id AND held.epoch = slot.epoch AND held.lease_until IS NOT NULL AND NOT held.has_slots
    WHERE quota.name = %(name)s::text OR quota.changed_at >= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(within_sec)s::double precision)
    FOR NO KEY UPDATE OF held SKIP LOCKED
))

-- name: look_soon
-- At all keys that tasks wait for, or that have used their rate.
INSERT INTO lineshaft.quota_wake AS known (quota, key, at)
SELECT wanted.quota, wanted.key, coalesce(%(now)s::timestamptz, now())
FROM (
    SELECT quota, key FROM lineshaft.quota_wake WHERE quota = %(name)s::text
    UNION
    SELECT quota, key FROM lineshaft.quota_use WHERE quota = %(name)s::text
) AS wanted
ORDER BY 1, 2
ON CONFLICT (quota, key) DO UPDATE SET at = excluded.at

-- name: look_at_due
SELECT looked, moved FROM lineshaft.look_at_due_quotas_1(%(limit)s::integer, coalesce(%(now)s::timestamptz, now()))

-- name: try_keep
-- One process at a time; none without quotas and fair shares.
SELECT 1 WHERE (
    EXISTS (SELECT FROM lineshaft.quota) OR EXISTS (SELECT FROM lineshaft.slot) OR (SELECT quota_kinds & 64 <> 0 FROM lineshaft.limits)
    OR EXISTS (SELECT FROM lineshaft.task_live AS live WHERE (live.admission ->> 'fair') IS NOT NULL)
)
  AND pg_try_advisory_xact_lock(hashtextextended('lineshaft.quotas', 0))

-- name: dead_slots
-- Tasks with slots that don't count: their claims ended, and the process that ended them died before its look.
SELECT DISTINCT slot.task_id
FROM lineshaft.slot
LEFT JOIN lineshaft.task_live AS holder ON holder.id = slot.task_id AND holder.epoch = slot.epoch AND holder.lease_until IS NOT NULL
WHERE holder.id IS NULL
LIMIT %(limit)s::integer

-- name: forget_uses
-- Of keys that weren't used since their window passed.
DELETE FROM lineshaft.quota_use
USING lineshaft.quota
WHERE quota.name = quota_use.quota
  AND quota_use.part < lineshaft.part_1(coalesce(%(now)s::timestamptz, now()), quota.rate_per_sec) - 61

-- name: write_kinds
-- Only what quotas say: another bit says that there are tasks with a fair_key.
UPDATE lineshaft.limits
SET quota_kinds = quota_kinds & ~191 | all_quotas.kinds,
    quota_lanes = CASE WHEN cardinality(all_quotas.lanes) <= 100 THEN all_quotas.lanes END
FROM (
    SELECT
        coalesce(bit_or(
            CASE WHEN gates.claims THEN lineshaft.quota_kind_1(match) ELSE 0 END | CASE WHEN max_waiting IS NOT NULL THEN 128 ELSE 0 END
        ), 0) AS kinds,
        coalesce(array_agg(DISTINCT regexp_replace(regexp_replace(match, '([\\%%_])', '\\\1', 'g'), '\*$', '%%'))
            FILTER (WHERE gates.claims AND lineshaft.quota_kind_1(match) < 16), '{}') AS lanes
    FROM lineshaft.quota
    CROSS JOIN LATERAL (SELECT lineshaft.gates_claims_1(max_running, rate_unit) AS claims) AS gates
) AS all_quotas

-- name: fair_tasks_ended
SELECT lineshaft.fair_tasks_ended_1()

-- name: repair_turns
SELECT lineshaft.repair_turns_1()

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
