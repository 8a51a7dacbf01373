-- Expressions that several statements contain. A statement includes one with a line `-- include: NAME`.

-- fragment: notify_lanes
-- Wakes processes that wait for work of these lanes: aggregates the column `lane_id`. A notification is at most 8,000 bytes long. A session
-- of a process with Redis gets the lanes instead, and pushes them to Redis after the commit.
CASE
    WHEN current_setting('lineshaft.wakeups', true) = 'redis' THEN lineshaft.report_lanes_1(array_agg(lane_id))
    ELSE pg_notify(
        lineshaft.channel(), CASE WHEN count(DISTINCT lane_id) < 700 THEN string_agg(DISTINCT lane_id::text, ',') ELSE '*' END
    )
END

-- fragment: lock_day
-- With a daily budget all that reserve of it take turns: two at once would both find its last dollar.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.day', 0)) FROM lineshaft.limits WHERE daily_budget_usd IS NOT NULL

-- fragment: free_slots
-- The columns of `lineshaft.instance` that change when claims end: `share` has n, `clock` has now.
held = instance.held - share.n,
busy_sec = instance.busy_sec + CASE
    WHEN instance.held = share.n THEN greatest(extract(epoch FROM clock.now - instance.busy_since)::double precision, 0) ELSE 0
END,
busy_since = CASE WHEN instance.held > share.n THEN instance.busy_since END

-- fragment: settle_agents
-- Settles what claims that end have reserved and cost, with their agents: `gone` has agent_id, reserved_usd, agent_reserved, attempt_cost_usd
-- (what the claim has reported before) and actual (its cost). Without money the agent's row isn't written: its instances don't wait for
-- each other.
UPDATE lineshaft.agent
SET reserved_usd = agent.reserved_usd - share.reserved, spent_usd = agent.spent_usd + share.actual
FROM (
    SELECT agent_id, sum(lineshaft.reserved_1(reserved_usd, agent_reserved)) AS reserved,
        sum(actual - lineshaft.booked_1(attempt_cost_usd, reserved_usd, agent_reserved)) AS actual
    FROM gone WHERE agent_id IS NOT NULL GROUP BY agent_id ORDER BY agent_id
) AS share
WHERE agent.id = share.agent_id AND (share.actual > 0 OR share.reserved > 0)

-- fragment: dag_money
-- The same, with DAGs: columns of a query of `gone` grouped by dag_id.
sum(reserved_usd) AS reserved, sum(actual - lineshaft.booked_1(attempt_cost_usd, reserved_usd, true)) AS actual

-- fragment: day_money
-- The same, with the day.
SELECT coalesce(sum(lineshaft.reserved_1(reserved_usd, day_reserved)), 0) AS reserved,
    coalesce(sum(actual - lineshaft.booked_1(attempt_cost_usd, reserved_usd, day_reserved)), 0) AS actual
FROM gone

-- fragment: free_day
UPDATE lineshaft.limits SET reserved_usd = limits.reserved_usd - share.reserved FROM share WHERE share.reserved > 0

-- fragment: spend_today
-- Books what is spent now: `share` has actual (money), `clock` has now.
INSERT INTO lineshaft.spend AS today (day, spent_usd)
SELECT (clock.now AT TIME ZONE 'UTC')::date, share.actual FROM share CROSS JOIN clock WHERE share.actual > 0
ON CONFLICT (day) DO UPDATE SET spent_usd = today.spent_usd + excluded.spent_usd

-- fragment: instance_liveness
-- Whether the process of an instance is alive, by the age of its heartbeat: offline if it has left or is silent, otherwise as it reported.
-- What was set by hand isn't considered.
CASE
    WHEN instance.last_heartbeat < coalesce(%(now)s::timestamptz, now())
        - make_interval(secs => greatest(90, 3 * instance.heartbeat_interval_sec)) THEN 'offline'
    ELSE instance.status::text
END

-- fragment: barriers_of_type
-- What keeps all tasks of a lane from being claimed: `lane`, `limits`, `breaker` and `slowdown` (joined_barriers), `clock` has now.
breaker.state::text AS breaker_state, breaker.failures, breaker.opened_at, breaker.forced, breaker.probe_task_id,
breaker.probe_at, NOT breaker.forced AND breaker.probe_task_id IS NULL AND coalesce(breaker.probe_at < clock.now, false) AS probe_due,
slowdown.until AS slowed_until, slowdown.reason AS slowed_because,
-- NULL: there is no daily budget.
(
    SELECT limits.daily_budget_usd - limits.reserved_usd - coalesce(sum(spend.spent_usd), 0)
    FROM lineshaft.spend WHERE spend.day = (clock.now AT TIME ZONE 'UTC')::date
) AS left_today_usd,
ARRAY(SELECT pause.type FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused,
ARRAY(SELECT pause.reason FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused_because,
ARRAY(SELECT pause.actor FROM lineshaft.pause WHERE pause.type IN ('*', lane.type) ORDER BY pause.type) AS paused_by

-- fragment: joined_barriers
LEFT JOIN lineshaft.breaker ON breaker.key = lane.type AND breaker.state <> 'closed'
LEFT JOIN lineshaft.slowdown ON slowdown.key = '*' AND slowdown.until > clock.now

-- fragment: lock_refused
-- Whether a claim of the task `live`, which needs one lock alone, is refused it: `held` is the lock, `holder` the live row of the task that
-- holds it. For other tasks: lineshaft.refused_lock_1.
held.holder_task_id <> coalesce(live.lock_owner, live.id)
    AND (held.expires_at >= clock.now OR coalesce(holder.is_batch, false))

-- fragment: has_locks
-- Whether the claim of the task `live` still has the document locks that it was given.
CASE
    WHEN live.admission ? 'locks' THEN lineshaft.has_locks_1(live.lock_key, live.admission, live.lock_token)
    ELSE (SELECT lock.token = live.lock_token FROM lineshaft.lock WHERE lock.key = live.lock_key)
END

-- fragment: lock_closed
-- Whether those that wait for the lock of `wanted` must go on waiting: it is held, and by readers only if a writer is among those that wait.
EXISTS (
    SELECT FROM lineshaft.lock
    -- (The second one not EXISTS: the planner might read all writers for that.)
    WHERE lock.key = wanted.lock_key AND (NOT lock.holder_task_id LIKE 'shared:%%' OR (
        SELECT true FROM lineshaft.task_live AS writer
        WHERE writer.lock_key = lock.key
          AND writer.parked = 'lock' AND (writer.admission -> 'locks' ->> writer.lock_key) IS DISTINCT FROM 'true'
        LIMIT 1
    ))
)

-- fragment: slowdown_until
-- The end of the longest slowdown of an instance, of which there are the columns `agent_id`, `models_available` and `accounts`; `clock` has now.
-- Of its accounts only if all are closed: until the first opens.
greatest(
    (
        SELECT max(slowdown.until)
        FROM lineshaft.slowdown
        WHERE slowdown.until > (SELECT now FROM clock)
          AND (slowdown.key IN ('*', 'agent:' || agent_id) OR EXISTS (
            SELECT FROM unnest(models_available) AS own (model)
            WHERE slowdown.key IN ('model:' || own.model, 'provider:' || split_part(own.model, '/', 1))
          ))
    ),
    CASE
        WHEN accounts <> '{}' AND lineshaft.open_accounts_1(accounts, NULL, (SELECT now FROM clock)) = '{}'
        THEN lineshaft.accounts_until_1(accounts, (SELECT now FROM clock))
    END
)

-- fragment: insert_completed
-- The end rows of tasks that complete; `gone` are their live rows with what the claims report, `clock` has now.
INSERT INTO lineshaft.task_end (
    id, status, epoch, ended_at, ready_at, claimed_at, started_at, first_started_at, attempts, revivals, agent_id, incarnation, model,
    version, account, cost_usd, tokens_input, tokens_output, output, artifacts, decision_report, output_type
)
SELECT
    gone.id, 'COMPLETED', gone.epoch, clock.now, gone.ready_at, gone.claimed_at, gone.started_at, gone.first_started_at, gone.attempts,
    gone.revivals, gone.agent_id, gone.incarnation, gone.model, gone.version, gone.account,
    gone.cost_usd + gone.actual,
    gone.tokens_input + gone.tokens_in, gone.tokens_output + gone.tokens_out,
    gone.output, gone.artifacts, gone.report, gone.output_type
FROM gone CROSS JOIN clock

-- fragment: claimed_columns
-- The columns of `live` that a claim sets. `taken` has chosen_model and cost, `me` is the instance, with now.
--
-- They are empty in a READY row; statements that put a row back empty them again.
status = CASE WHEN %(start)s::boolean THEN 'RUNNING' ELSE 'CLAIMED' END::lineshaft.task_status,
epoch = live.epoch + 1,
agent_id = %(agent_id)s::text,
incarnation = %(incarnation)s::integer,
budget_reported = false,
model = taken.chosen_model,
version = me.version,
reserved_usd = taken.cost,
claimed_at = me.now,
heartbeat_at = me.now,
started_at = CASE WHEN %(start)s::boolean THEN me.now END,
first_started_at = CASE WHEN %(start)s::boolean AND live.first_started_at IS NULL THEN me.now ELSE live.first_started_at END,
limit_at = CASE WHEN %(start)s::boolean THEN me.now + live.limit_sec * interval '1 second' END,
-- From the end of the wait: a claim may have waited for its agent's row longer than a short lease lasts.
lease_until = coalesce(%(now)s::timestamptz, clock_timestamp()) + interval '1 second' * CASE
    WHEN %(start)s::boolean THEN least(3 * coalesce(live.heartbeat_sec, me.heartbeat_interval_sec), live.limit_sec)
    ELSE me.claim_ttl_sec
END

-- fragment: is_outdated
-- Whether the defaults of its type have changed since a task got its limits (guards/type_limits.py).
EXISTS (
    SELECT FROM lineshaft.task_type AS kind
    WHERE kind.type = task.type AND kind.revision IS DISTINCT FROM task.type_revision AND task.open_limits IS DISTINCT FROM 0
)

-- fragment: few_lanes
-- The lanes of the types that a claim is for, or all lanes, if there are few: it looks into each of them, which costs less than to find those
-- with work. NULL: there are many. `search` has the types of the instance.
SELECT CASE WHEN cardinality(of_types.ids) <= 250 THEN of_types.ids END AS ids
FROM search
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN coalesce(%(types)s::text[], search.types) IS NULL THEN ARRAY(SELECT lane.id FROM lineshaft.lane ORDER BY lane.id LIMIT 251)
        ELSE ARRAY(
            SELECT lane.id
            FROM unnest(coalesce(%(types)s::text[], search.types)) AS wanted (type)
            CROSS JOIN LATERAL (
                -- lane.type = wanted.type, in words that let the planner expect many, and so walk along the index.
                SELECT id FROM lineshaft.lane
                WHERE (lane.type, lane.required_capabilities) >= (wanted.type, '{}'::text[]) AND lane.type <= wanted.type
                ORDER BY lane.type, lane.required_capabilities, lane.models
                LIMIT 251
                OFFSET 0
            ) AS lane
            WHERE search.types IS NULL OR wanted.type = ANY (search.types)
            LIMIT 251
        )
    END AS ids
    OFFSET 0
) AS of_types

-- fragment: waiting_lanes
-- The first task of each lane and generation that has claimable ones, by one look-up in task_live_claimable each: lanes without work cost
-- nothing. The recursive query `waiting`; `generations` has no, and `clock` has now: tasks that have expired by then aren't seen.
SELECT generations.no AS generation, head.lane_id, head.rank, head.submission_no
FROM generations
CROSS JOIN LATERAL (
    SELECT lane_id, rank, submission_no
    FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = generations.no
      AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
    ORDER BY lane_id, rank, submission_no
    LIMIT 1
    OFFSET 0
) AS head
UNION ALL
SELECT waiting.generation, head.lane_id, head.rank, head.submission_no
FROM waiting
CROSS JOIN LATERAL (
    SELECT lane_id, rank, submission_no
    FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = waiting.generation AND lane_id > waiting.lane_id
      AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
    ORDER BY lane_id, rank, submission_no
    LIMIT 1
    OFFSET 0
) AS head

-- fragment: heads_of_few_lanes
-- The same for each lane in `few`.
SELECT generation.no AS generation, lane.id AS lane_id, head.rank, head.submission_no
FROM (SELECT unnest(ids) AS id FROM few) AS lane
CROSS JOIN lineshaft.generation
CROSS JOIN LATERAL (
    SELECT rank, submission_no
    FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = generation.no AND lane_id = lane.id
      AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
    ORDER BY rank, submission_no
    LIMIT 1
    OFFSET 0
) AS head

-- fragment: best_tasks
-- The lanes and generations of the best tasks, once for each: `best_head` are the best heads and how many tasks each lane can give at most,
-- `me` has room.
SELECT best_head.*
FROM best_head
CROSS JOIN LATERAL (
    SELECT rank, submission_no
    FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = best_head.generation AND lane_id = best_head.id
      AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
      AND (best_head.heads < (SELECT room FROM me) OR rank <= (best_head.worst + 1) / 1e6 + best_head.aged)
    ORDER BY rank, submission_no
    LIMIT best_head.most
    OFFSET 0
) AS next
WHERE heads > 1
-- Tasks before the head were passed over.
ORDER BY greatest(round((next.rank - best_head.aged) * 1e6), best_head.effective), next.submission_no
LIMIT (SELECT room FROM me)

-- fragment: key_is_free
-- Whether a row `known` of task_key is over: its task was cancelled or dead-lettered, or completed longer ago than the key's window.
(
    known.expires_at < coalesce(%(now)s::timestamptz, now())
    OR (
        SELECT ended.status = 'COMPLETED' AND ended.ended_at + make_interval(secs => known.ttl_sec) <= coalesce(%(now)s::timestamptz, now())
        FROM lineshaft.task_end AS ended WHERE ended.id = known.task_id
    )
)

-- fragment: knows_types
-- Ends the submission with an error if defaults of types have changed since the process read them: it reads them again, and repeats it.
-- Or if quotas bound waiting tasks, and it hasn't been checked.
CASE
    WHEN (coalesce((SELECT max(revision) FROM lineshaft.task_type), 0) = %(known_revision)s::integer) IS NOT FALSE THEN CASE
        WHEN %(checks_waiting)s::boolean OR (SELECT quota_kinds & 128 = 0 FROM lineshaft.limits) THEN true
        ELSE lineshaft.refuse_unchecked_1()
    END
    ELSE lineshaft.refuse_stale_types_1()
END

-- fragment: over_limit
-- The limit that an attempt is over: `live` is its row. NULL: none. A task within its reservation goes on when others overspend; it stops when a
-- limit itself was lowered below what has been spent, part of which is within reservations. Only then the held tasks are read, by the index
-- of leases.
CASE
    WHEN EXISTS (SELECT FROM lineshaft.pause WHERE pause.stops) THEN 'velocity'
    WHEN live.attempt_cost_usd > 0 AND (
        SELECT NOT lineshaft.within_limit_1(live.attempt_cost_usd, task.max_cost_usd) FROM lineshaft.task WHERE task.id = live.id
    ) THEN 'max_cost'
    -- Also one that was over it when it was claimed, because of a late report.
    WHEN (live.attempt_cost_usd > 0 OR live.cost_usd > 0) AND (
        SELECT task.max_total_cost_usd < live.cost_usd + live.attempt_cost_usd FROM lineshaft.task WHERE task.id = live.id
    ) THEN 'max_total_cost'
    WHEN (
        SELECT agent.spent_usd + agent.reserved_usd > agent.budget_usd AND (
            lineshaft.booked_1(live.attempt_cost_usd, live.reserved_usd, live.agent_reserved) > 0
            OR (agent.budget_cut AND agent.budget_usd - agent.spent_usd < (
                SELECT coalesce(sum(least(held.attempt_cost_usd, held.reserved_usd)), 0) FROM lineshaft.task_live AS held
                WHERE held.lease_until > '-infinity' AND held.agent_id = agent.id AND held.agent_reserved
            ))
        )
        FROM lineshaft.agent WHERE agent.id = live.agent_id
    ) THEN 'agent_budget'
    WHEN live.dag_id IS NOT NULL AND (
        SELECT dag.spent_usd + dag.reserved_usd > dag.budget_ceiling_usd AND (
            lineshaft.booked_1(live.attempt_cost_usd, live.reserved_usd, true) > 0
            OR (dag.budget_cut AND dag.budget_ceiling_usd - dag.spent_usd < (
                SELECT coalesce(sum(least(held.attempt_cost_usd, held.reserved_usd)), 0) FROM lineshaft.task_live AS held
                WHERE held.lease_until > '-infinity' AND held.dag_id = dag.id
            ))
        )
        FROM lineshaft.dag WHERE dag.id = live.dag_id
    ) THEN 'dag_budget'
    WHEN (
        SELECT coalesce(spend.spent_usd, 0) + limits.reserved_usd > limits.daily_budget_usd AND (
            lineshaft.booked_1(live.attempt_cost_usd, live.reserved_usd, live.day_reserved) > 0
            OR (limits.daily_budget_cut = today.day AND limits.daily_budget_usd - coalesce(spend.spent_usd, 0) < (
                SELECT coalesce(sum(least(held.attempt_cost_usd, held.reserved_usd)), 0) FROM lineshaft.task_live AS held
                WHERE held.lease_until > '-infinity' AND held.day_reserved
            ))
        )
        FROM lineshaft.limits
        CROSS JOIN (SELECT (coalesce(%(now)s::timestamptz, now()) AT TIME ZONE 'UTC')::date AS day) AS today
        LEFT JOIN lineshaft.spend ON spend.day = today.day
    ) THEN 'daily_budget'
END

-- fragment: is_turn
-- Whether an edge is between two children of a list, of which only so many run at once: one waits for the end of the other, and needs nothing
-- of it. (Look-ups by id, not joins: a list may have thousands of children.)
(
    edge.kind = 'ended'
    AND (SELECT one.parent_id FROM lineshaft.task AS one WHERE one.id = edge.task_id)
        = (SELECT other.parent_id FROM lineshaft.task AS other WHERE other.id = edge.depends_on)
    AND (
        SELECT batch.for_each IS NOT NULL FROM lineshaft.task AS batch
        WHERE batch.id = (SELECT one.parent_id FROM lineshaft.task AS one WHERE one.id = edge.task_id)
    ) IS TRUE
)
