-- Completes one task, claims one, or both at once: migrations/0017_quotas.sql. While there are tasks with a fair_key, claim_tasks decides.

-- name: complete_and_claim
SELECT
    id, epoch, live_dag_id, lock_key, model, attempts, rate_limits, cost_usd, limit_sec, heartbeat_interval_sec, resume, type, title, spec, inputs, dag_id,
    parent_id, deadline, max_attempts, max_cost_usd, require_decision_report, outdated,
    now, claim_ttl_sec, completed, CASE WHEN %(next)s::boolean AND fair.exist THEN 'weigh' ELSE verdict END AS verdict
FROM (SELECT quota_kinds & 64 <> 0 AS exist FROM lineshaft.limits) AS fair
CROSS JOIN LATERAL lineshaft.complete_and_claim_3(
    %(id)s::text, %(epoch)s::integer, %(output)s::jsonb, %(artifacts)s::jsonb, %(report)s::jsonb, %(output_type)s::text, %(cost)s::numeric,
    %(tokens_in)s::bigint, %(tokens_out)s::bigint, %(next)s::boolean AND NOT fair.exist, %(agent_id)s::text, %(incarnation)s::integer, %(types)s::text[], %(start)s::boolean,
    %(now)s::timestamptz
)

-- name: claim
-- Claims one task. No row where nothing can be claimed and no task is READY at all, as in an idle fleet: the function isn't called then, the
-- instance's own row and two index look-ups decide.
SELECT
    id, epoch, live_dag_id, lock_key, model, attempts, rate_limits, cost_usd, limit_sec, heartbeat_interval_sec, resume, type, title, spec, inputs, dag_id,
    parent_id, deadline, max_attempts, max_cost_usd, require_decision_report, outdated,
    now, claim_ttl_sec, completed, verdict
FROM (SELECT quota_kinds & 64 <> 0 AS exist FROM lineshaft.limits) AS fair
-- Without an agent the function claims nothing, and says so.
CROSS JOIN LATERAL lineshaft.complete_and_claim_3(
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, CASE WHEN NOT fair.exist THEN %(agent_id)s::text END, %(incarnation)s::integer, %(types)s::text[], %(start)s::boolean,
    %(now)s::timestamptz
)
WHERE fair.exist OR NOT EXISTS (
    SELECT FROM lineshaft.instance
    WHERE instance.agent_id = %(agent_id)s::text AND instance.incarnation = %(incarnation)s::integer
      AND instance.status = 'active' AND instance.set_status IS NULL
      AND coalesce(instance.set_max_tasks, instance.max_concurrent_tasks) > instance.held
      AND NOT EXISTS (SELECT FROM lineshaft.task_live AS live WHERE live.status = 'READY' AND live.parked IS NULL)
      AND NOT EXISTS (
          SELECT FROM lineshaft.task_live AS live
          WHERE live.status IN ('PENDING', 'RETRYING') AND live.due_at IS NOT NULL AND live.due_at <= coalesce(%(now)s::timestamptz, clock_timestamp())
      )
      -- Otherwise the function raises the error.
      AND NOT current_setting('transaction_read_only')::boolean
)

-- name: claimed_with
-- The claim that a completion asked for, while it is held: the caller didn't get the answer. It was made in the same transaction, or its event
-- names the completion.
WITH claimed AS (
    SELECT claimed.task_id AS id, claimed.epoch
    FROM (
        SELECT xid, at, agent_id FROM lineshaft.event
        WHERE task_id = %(id)s::text AND epoch = %(epoch)s::integer AND 'task.completed' = ANY (kinds)
        LIMIT 1
    ) AS completed
    -- The time, too: after a restored dump, ids of transactions come again.
    JOIN lineshaft.event AS claimed
      ON claimed.xid = completed.xid AND claimed.at = completed.at AND claimed.agent_id = completed.agent_id
     AND 'task.claimed' = ANY (claimed.kinds)
    UNION ALL
    SELECT held.id, held.epoch
    FROM lineshaft.task_live AS held
    JOIN lineshaft.event ON event.task_id = held.id AND event.epoch = held.epoch AND 'task.claimed' = ANY (event.kinds)
    WHERE held.lease_until IS NOT NULL
      AND held.agent_id = (
          SELECT coalesce(
              (SELECT agent_id FROM lineshaft.task_end WHERE task_end.id = %(id)s::text AND task_end.epoch = %(epoch)s::integer),
              (SELECT agent_id FROM lineshaft.attempt WHERE attempt.task_id = %(id)s::text AND attempt.epoch = %(epoch)s::integer LIMIT 1)
          )
      )
      AND event.data @> jsonb_build_object('follows', jsonb_build_object('task_id', %(id)s::text, 'epoch', %(epoch)s::integer))
)
SELECT
    live.id, live.epoch, live.dag_id AS live_dag_id, task.lock_key, live.model, live.attempts, live.rate_limits, live.cost_usd, live.limit_sec,
    coalesce(live.heartbeat_sec, instance.heartbeat_interval_sec) AS heartbeat_interval_sec,
    live.first_started_at < live.claimed_at AS resume, task.type, task.title, task.spec, task.inputs, task.dag_id, task.parent_id,
    task.deadline, task.max_attempts, task.max_cost_usd, task.require_decision_report,
    -- The call that made the claim has checked it.
    false AS outdated, live.account, task.admission -> 'locks' AS locks, live.claimed_at AS now, instance.claim_ttl_sec,
    live.status = 'RUNNING' AS started
FROM claimed
JOIN lineshaft.task_live AS live ON live.id = claimed.id AND live.epoch = claimed.epoch
JOIN lineshaft.task ON task.id = live.id
JOIN lineshaft.instance ON instance.agent_id = live.agent_id AND instance.incarnation = live.incarnation
WHERE live.status IN ('CLAIMED', 'RUNNING') AND live.lease_until > coalesce(%(now)s::timestamptz, now())
