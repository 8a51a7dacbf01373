-- name: lock_day
-- Comes before the claim, which then sees everything that others have reserved.
-- include: lock_day

-- name: claim_tasks
-- Claims up to `limit` tasks, best first, and with `start` starts them too; or only `task_id`. With `probing` it claims only tasks that these
-- breakers hold back: the caller makes each the probe of its breaker.
-- `passed_over` are parts of lanes (see `part`) that other claims locked in an earlier round. `ahead` is for admit_1.
--
-- Every look-up of READY tasks uses task_live_claimable, (generation, lane_id, rank, submission_no): one probe for the head of each lane
-- with work, then no more rows than are claimed. OFFSET 0 keeps the planner from turning the probes into a join over the whole table,
-- whatever its statistics say. Hash and merge joins are off: two CTEs are never joined, which would take the square of their sizes.
--
-- One statement is enough here, and one is much cheaper than several; this is why it is long. Its snapshot may be older than the locks it
-- waits for, but everything that decides is read again from the locked row: the instance's slots, the agent's money, each task, each DAG's
-- money, each document lock.
WITH RECURSIVE clock AS MATERIALIZED (
    -- Not now(), when the transaction began: what this statement sees may have happened since, while it was planned, and a task must not
    -- seem to have started before its dependencies ended.
    SELECT now, lineshaft.minutes(now) AS minutes FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp()) AS now OFFSET 0) AS clock
),
-- Locked first: two claims of one instance wait for each other instead of both taking its last slot.
me AS MATERIALIZED (
    SELECT
        agent_id, capabilities, types, models_available, accounts, version, claim_ttl_sec, heartbeat_interval_sec,
        (SELECT now FROM clock) AS now,
        EXISTS (SELECT FROM lineshaft.slowdown WHERE key = 'agent:' || agent_id AND until > (SELECT now FROM clock)) AS is_slow,
        -- Nothing until the caller knows that there are tasks with a fair_key, and makes turns first (make_turns_1).
        CASE
            WHEN %(turns)s::boolean IS TRUE OR %(task_id)s::text IS NOT NULL OR (SELECT quota_kinds & 64 = 0 FROM lineshaft.limits)
            THEN greatest(least(%(limit)s::integer, coalesce(set_max_tasks, max_concurrent_tasks) - held), 0)
            ELSE 0
        END AS room
    FROM lineshaft.instance
    WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND status = 'active' AND set_status IS NULL
    FOR NO KEY UPDATE
),
-- The agent's row is locked only where there is a budget: two claims must not both take its last dollar, but instances without a budget
-- don't wait for each other.
own_budget AS MATERIALIZED (
    SELECT budget_usd - spent_usd - reserved_usd AS money
    FROM lineshaft.agent
    WHERE id = %(agent_id)s::text AND budget_usd IS NOT NULL AND (SELECT count(*) FROM me) > 0
    FOR NO KEY UPDATE
),
-- The smaller of what the agent has left and what all agents have left today; NULL: no limit.
funds AS MATERIALIZED (
    SELECT
        least((SELECT money FROM own_budget), limits.daily_budget_usd - limits.reserved_usd - coalesce(spend.spent_usd, 0)) AS money,
        EXISTS (SELECT FROM own_budget) AS of_agent,
        limits.daily_budget_usd IS NOT NULL AS of_day,
        limits.default_max_cost_usd, limits.quota_kinds, limits.quota_lanes,
        limits.quota_kinds & 8 <> 0 AND coalesce('agent:' || %(agent_id)s::text LIKE ANY (limits.quota_lanes), true) AS agent_has_quota
    FROM lineshaft.limits
    LEFT JOIN lineshaft.spend ON spend.day = (SELECT (now AT TIME ZONE 'UTC')::date FROM clock)
),
-- Models and types that can't be used now: slowed down after a rate limit, or with a breaker that isn't closed; and types that are paused.
barred AS MATERIALIZED (
    SELECT keys, keys || ARRAY(SELECT type FROM lineshaft.pause) AS types
    FROM (
        SELECT ARRAY(
            SELECT key FROM lineshaft.slowdown WHERE until > (SELECT now FROM clock)
            UNION ALL
            SELECT key FROM lineshaft.breaker WHERE state <> 'closed' AND (key = ANY (%(probing)s::text[])) IS NOT TRUE
        ) AS keys
    ) AS slow_or_broken
),
-- The accounts of this instance that can be used; only those that are probed, if there are some. Read once its rows are locked: a claim that
-- had to wait doesn't use an account that was closed in the meantime.
usable AS MATERIALIZED (
    SELECT names, coalesce(nullif(ARRAY(
        SELECT name FROM unnest(names) AS name WHERE 'account:' || name = ANY (%(probing)s::text[])
    ), '{}'), names) AS preferred
    FROM (
        SELECT CASE
            WHEN me.accounts = '{}' THEN '{}'
            WHEN (SELECT count(*) FROM own_budget) >= 0
            THEN lineshaft.open_accounts_1(me.accounts, %(probing)s::text[], (SELECT now FROM clock))
        END AS names
        FROM me
    ) AS offered
),
search AS MATERIALIZED (SELECT types FROM me WHERE room > 0 AND %(task_id)s::text IS NULL),
few AS MATERIALIZED (
    -- include: few_lanes
),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation WHERE (SELECT ids IS NULL FROM few)),
waiting AS (
    -- include: waiting_lanes
),
-- Lanes with work and their first tasks; or the lane of `task_id`.
found AS MATERIALIZED (
    SELECT generation, lane_id, rank, submission_no FROM waiting
    UNION ALL
    (
        -- include: heads_of_few_lanes
    )
    UNION ALL
    SELECT generation, lane_id, rank, submission_no FROM lineshaft.task_live WHERE id = %(task_id)s::text AND status = 'READY'
),
-- Those with tasks for agents like this one.
suitable AS MATERIALIZED (
    SELECT
        found.lane_id AS id, found.generation, found.rank, found.submission_no, lane.type, chosen.model,
        -- How many of its tasks the quotas of the lane admit; NULL: it has none.
        quotas.room,
        lane.boost_per_minute * (SELECT minutes FROM clock) AS aged,
        -- There is money for some of its tasks, but not for all of them, nor for two of any.
        coalesce(funds.money < 2 * lane.cost_from_usd, false) AS is_scarce,
        -- Whether this agent may claim them now.
        (chosen.model IS NOT NULL OR (lane.models = '{}' AND me.models_available = '{}'))
        AND lineshaft.affords_1(funds.money, lane.cost_from_usd, funds.default_max_cost_usd)
        AND coalesce(quotas.room > 0, true)
        AND NOT me.is_slow
        AND (me.accounts = '{}' OR usable.names <> '{}')
        AND (
            %(probing)s::text[] IS NULL OR lane.type = ANY (%(probing)s::text[])
            OR 'account:' || usable.preferred[1] = ANY (%(probing)s::text[])
            OR coalesce('model:' || chosen.model = ANY (%(probing)s::text[]), false)
        ) AS is_eligible
    FROM me
    CROSS JOIN funds
    CROSS JOIN barred
    CROSS JOIN usable
    CROSS JOIN found
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = found.lane_id OFFSET 0) AS lane
    CROSS JOIN LATERAL (SELECT lineshaft.chosen_model_1(lane.models, me.models_available, barred.keys) AS model OFFSET 0) AS chosen
    CROSS JOIN LATERAL (
        SELECT CASE WHEN lineshaft.lane_has_quota_1(funds.quota_kinds, funds.quota_lanes, lane.type, chosen.model) OR funds.agent_has_quota THEN lineshaft.room_for_1(
            lineshaft.lane_keys_1(lane.type, chosen.model, NULL, %(agent_id)s::text), (SELECT now FROM clock)
        ) END AS room
        OFFSET 0
    ) AS quotas
    WHERE me.room > 0
      AND lineshaft.suits_1(lane.type, lane.required_capabilities, lane.models, me.types, me.capabilities, me.models_available)
      AND (%(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[]))
      AND NOT lineshaft.is_barred_1(lane.type, barred.types)
),
-- Breakers that may be probed: usually none.
due_breaker AS MATERIALIZED (
    SELECT key FROM lineshaft.breaker
    WHERE state <> 'closed' AND NOT forced AND probe_task_id IS NULL AND probe_at < (SELECT now FROM clock)
),
head AS MATERIALIZED (
    SELECT
        suitable.id, suitable.generation, suitable.aged, suitable.type, suitable.model, suitable.room IS NOT NULL AS has_quota,
        -- To a millionth: lanes of different rates agree on what is equal, and then the order of submission decides.
        round((coalesce(affordable.rank, suitable.rank) - suitable.aged) * 1e6) AS effective,
        coalesce(affordable.submission_no, suitable.submission_no) AS submission_no,
        CASE WHEN suitable.is_scarce THEN 1 ELSE least((SELECT room FROM me), suitable.room) END AS most,
        -- Tasks after these aren't looked at.
        coalesce(affordable.rank, 'Infinity') AS last_rank, coalesce(affordable.submission_no, 9223372036854775807) AS last_no
    FROM suitable
    LEFT JOIN LATERAL (
        -- Tasks that cost too much are passed over, up to a limit.
        SELECT next.rank, next.submission_no
        FROM (
            SELECT rank, submission_no, lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd
            FROM lineshaft.task_live
            WHERE suitable.is_scarce
              AND status = 'READY' AND parked IS NULL AND generation = suitable.generation AND lane_id = suitable.id
              AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
            ORDER BY rank, submission_no
            LIMIT 100
            OFFSET 0
        ) AS next
        WHERE lineshaft.affords_1((SELECT money FROM funds), next.limit_usd, NULL)
        ORDER BY next.rank, next.submission_no
        LIMIT 1
    ) AS affordable ON true
    WHERE suitable.is_eligible AND (NOT suitable.is_scarce OR affordable.rank IS NOT NULL)
      AND %(task_id)s::text IS NULL
      AND (suitable.id::bigint << 32) + suitable.generation <> ALL (%(passed_over)s::bigint[])
),
-- The best `room` tasks are in the `room` lanes with the best heads, and none of them is worse than the last of those heads.
best_head AS MATERIALIZED (
    SELECT *, count(*) OVER () AS heads, max(effective) OVER () AS worst
    FROM (SELECT * FROM head ORDER BY effective, submission_no LIMIT (SELECT room FROM me)) AS best
),
-- How many to claim from each part of a lane. Read without locks; from a single one it is simply all.
quota AS MATERIALIZED (
    SELECT id, generation, (id::bigint << 32) + generation AS part, aged, type, model, has_quota, last_rank, last_no, most::bigint AS n
    FROM best_head WHERE heads = 1
    UNION ALL
    SELECT id, generation, (id::bigint << 32) + generation, aged, type, model, has_quota, last_rank, last_no, count(*)
    FROM (
        -- include: best_tasks
    ) AS best
    GROUP BY id, generation, aged, type, model, has_quota, last_rank, last_no
),
-- Locked rows are skipped; the next ones of the lane take their place. (NO KEY: a submission that only blocks a task's end, because a new
-- task depends on it, doesn't conflict.)
locked AS MATERIALIZED (
    SELECT
        taken.*, quota.part, round((taken.rank - quota.aged) * 1e6) AS effective, quota.type, quota.model AS chosen_model,
        limited.is_limited,
        -- Nothing to weigh: no slot or lock to take, no money to count. Most tasks.
        NOT limited.is_limited AND taken.lock_key IS NULL AND funds.money IS NULL AND (taken.dag_id IS NULL OR (taken.cost = 0 AND (
            SELECT lineshaft.affords_1(dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd, taken.limit_usd, NULL)
            FROM lineshaft.dag WHERE dag.id = taken.dag_id
        ) IS TRUE)) AS is_simple
    FROM quota
    CROSS JOIN funds
    CROSS JOIN LATERAL (
        SELECT id, rank, submission_no, dag_id, lock_key, lock_owner, admission, admission -> 'locks' AS locks, heartbeat_sec,
            last_account, first_started_at IS NOT NULL AS resume,
            lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd, funds.default_max_cost_usd,
            lineshaft.reservation_2(
                lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd), funds.default_max_cost_usd
            ) AS cost
        FROM lineshaft.task_live
        WHERE status = 'READY' AND parked IS NULL AND generation = quota.generation AND lane_id = quota.id
          AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
          AND (rank, submission_no) <= (quota.last_rank, quota.last_no)
          AND lineshaft.affords_1(
            funds.money, lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd), funds.default_max_cost_usd
          )
        ORDER BY rank, submission_no
        LIMIT quota.n
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS taken
    CROSS JOIN LATERAL (
        SELECT quota.has_quota OR funds.quota_kinds & 16 <> 0 OR (taken.admission IS NOT NULL AND funds.quota_kinds & 32 <> 0)
            OR (funds.quota_kinds & 4 <> 0 AND (SELECT accounts <> '{}' FROM me)) AS is_limited
    ) AS limited
    UNION ALL
    SELECT named.*, 0, 0, suitable.type, suitable.model, funds.quota_kinds & 63 <> 0, false
    FROM suitable
    CROSS JOIN funds
    CROSS JOIN LATERAL (
        SELECT id, rank, submission_no, dag_id, lock_key, lock_owner, admission, admission -> 'locks' AS locks, heartbeat_sec,
            last_account, first_started_at IS NOT NULL AS resume,
            lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd, funds.default_max_cost_usd,
            lineshaft.reservation_2(
                lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd), funds.default_max_cost_usd
            ) AS cost
        FROM lineshaft.task_live
        WHERE id = %(task_id)s::text AND status = 'READY' AND NOT lineshaft.is_expired_1(expires, deadline, (SELECT now FROM clock))
          -- It may have been moved since.
          AND lane_id = suitable.id
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS named
    WHERE suitable.is_eligible
),
-- By task, if the instance has accounts.
chosen_account AS MATERIALIZED (
    SELECT CASE WHEN me.accounts <> '{}' THEN (
        SELECT lineshaft.chosen_accounts_1(
            usable.preferred, array_agg(id ORDER BY effective, submission_no), array_agg(last_account ORDER BY effective, submission_no),
            array_agg(dag_id ORDER BY effective, submission_no)
        )
        FROM locked
    ) END AS by_task
    FROM me CROSS JOIN usable
),
-- From here on to `decided`: tasks that need slots of quotas, a lock, or money.
--
-- No row unless quotas concern some of them.
admission AS MATERIALIZED (
    SELECT lineshaft.admit_1(
        (SELECT quota_kinds FROM funds), asking.ids, asking.types, asking.models, asking.accounts,
        %(agent_id)s::text, %(ahead)s::integer, (SELECT now FROM clock)
    ) AS verdicts
    FROM (
        SELECT array_agg(id ORDER BY effective, submission_no) AS ids, array_agg(type ORDER BY effective, submission_no) AS types,
            array_agg(chosen_model ORDER BY effective, submission_no) AS models,
            array_agg(chosen_account.by_task ->> id ORDER BY effective, submission_no) AS accounts
        FROM locked CROSS JOIN chosen_account WHERE is_limited HAVING count(*) > 0
    ) AS asking
),
-- Before any lock is taken: a task that its DAG can't afford must not hold one. `money` is NULL without a budget; a task that doesn't fit
-- even alone isn't counted against those after it.
weighed AS MATERIALIZED (
    SELECT
        affordable.*,
        affordable.dag_id IS NOT NULL AND dag_funds.is_seen IS NULL AS has_unseen_dag,
        coalesce(dag_funds.fits_alone, true) AS fits_alone,
        lineshaft.affords_1(
            dag_funds.money - coalesce(sum(affordable.cost) FILTER (WHERE dag_funds.fits_alone) OVER (
                PARTITION BY affordable.dag_id ORDER BY affordable.effective, affordable.submission_no
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0),
            affordable.limit_usd, affordable.default_max_cost_usd
        ) AS fits
    FROM (
        SELECT locked.*, sum(locked.cost) OVER (ORDER BY locked.effective, locked.submission_no) - locked.cost AS cost_before,
            -- A lock lasts at least as long as the lease: with a heartbeat interval of an hour it must, too.
            greatest(
                %(lock_ttl)s::double precision, me.claim_ttl_sec, 3 * coalesce(locked.heartbeat_sec, me.heartbeat_interval_sec)
            ) AS lock_seconds
        FROM locked CROSS JOIN me
        WHERE NOT locked.is_simple
          AND (NOT locked.is_limited OR ((SELECT verdicts FROM admission) -> locked.id ->> 'refused')::boolean IS NOT TRUE)
    ) AS affordable
    LEFT JOIN LATERAL (
        SELECT true AS is_seen, dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd AS money,
            lineshaft.affords_1(
                dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd, affordable.limit_usd, affordable.default_max_cost_usd
            ) AS fits_alone
        FROM lineshaft.dag WHERE dag.id = affordable.dag_id
        OFFSET 0
    ) AS dag_funds ON true
    WHERE lineshaft.affords_1(
        (SELECT money FROM funds) - affordable.cost_before, affordable.limit_usd, affordable.default_max_cost_usd
    )
),
-- One task per lock: the best, unless it is the lock of a batch, whose children go first. ON CONFLICT DO UPDATE locks the row also where
-- its condition doesn't hold, so the lock can't be released between here and the parking of the tasks that didn't get it.
lock_granted AS (
    INSERT INTO lineshaft.lock AS held (key, holder_task_id, agent_id, acquired_at, expires_at)
    SELECT best.lock_key, best.holder, %(agent_id)s::text, clock.now, clock.now + best.lock_seconds * interval '1 second'
    FROM (
        SELECT DISTINCT ON (weighed.lock_key) weighed.lock_key, coalesce(weighed.lock_owner, weighed.id) AS holder, weighed.lock_seconds
        FROM weighed LEFT JOIN lineshaft.lock ON lock.key = weighed.lock_key
        WHERE weighed.lock_key IS NOT NULL AND weighed.fits_alone AND weighed.fits
          AND NOT EXISTS (SELECT FROM weighed AS other WHERE other.locks IS NOT NULL)
        ORDER BY weighed.lock_key, lock.holder_task_id IS DISTINCT FROM weighed.lock_owner, weighed.effective, weighed.submission_no
    ) AS best
    CROSS JOIN clock
    ORDER BY best.lock_key
    ON CONFLICT (key) DO UPDATE
        SET holder_task_id = excluded.holder_task_id, agent_id = excluded.agent_id, acquired_at = excluded.acquired_at,
            expires_at = excluded.expires_at, token = nextval('lineshaft.lock_token')
        WHERE held.holder_task_id = excluded.holder_task_id
           OR (held.expires_at < excluded.acquired_at
               -- A batch keeps its lock while it has children to run: there are no heartbeats during a child's back-off.
               -- (Not EXISTS: the planner might read all batches for that.)
               AND coalesce((SELECT NOT is_batch FROM lineshaft.task_live WHERE id = held.holder_task_id), true))
    RETURNING key, holder_task_id, token
),
-- By key: the holder of each lock that was granted, and its token.
granted AS MATERIALIZED (SELECT jsonb_object_agg(key, jsonb_build_array(holder_task_id, token)) AS locks FROM lock_granted),
-- If one of the tasks needs several locks, or shares one, a function takes those of all: for each task all or none. By task: the token, the
-- first lock that it can't have, and locks whose waiters may be able to go on now.
taken_together AS MATERIALIZED (
    SELECT jsonb_object_agg(taken.id, jsonb_build_array(taken.granted, taken.refused_key, taken.others)) AS tasks
    FROM (
        SELECT array_agg(id ORDER BY effective, submission_no) AS ids, array_agg(lock_owner ORDER BY effective, submission_no) AS owners,
            array_agg(lock_key ORDER BY effective, submission_no) AS lock_keys, array_agg(locks ORDER BY effective, submission_no) AS locks,
            array_agg(lock_seconds ORDER BY effective, submission_no) AS seconds
        FROM weighed
        WHERE lock_key IS NOT NULL AND fits_alone AND fits
        HAVING bool_or(locks IS NOT NULL)
    ) AS asking
    CROSS JOIN clock
    CROSS JOIN LATERAL lineshaft.take_locks_1(
        %(agent_id)s::text, clock.now, asking.ids, asking.owners, asking.lock_keys, asking.locks, asking.seconds
    ) AS taken
),
unlocked AS MATERIALIZED (
    SELECT *,
        -- Children of one batch share its lock, but they run one at a time.
        lock_key IS NULL OR has_all
        OR (holds AND row_number() OVER (PARTITION BY lock_key, holds ORDER BY effective, submission_no) = 1) AS has_lock
    FROM (
        SELECT weighed.*,
            coalesce(granted.locks -> weighed.lock_key ->> 1, together.tasks -> weighed.id ->> 0)::bigint AS lock_token,
            together.tasks -> weighed.id ->> 1 AS refused_key,
            together.tasks -> weighed.id ->> 0 IS NOT NULL AS has_all,
            coalesce(granted.locks -> weighed.lock_key ->> 0 = coalesce(weighed.lock_owner, weighed.id), false)
                AND weighed.fits_alone AND weighed.fits AS holds
        FROM weighed CROSS JOIN granted CROSS JOIN taken_together AS together
    ) AS asking
),
-- What this claim takes from each DAG. Most DAGs have no row.
dag_share AS MATERIALIZED (
    SELECT claimed.dag_id AS id, sum(claimed.cost) AS needed, max(chosen_account.by_task ->> claimed.id) AS account
    FROM (
        SELECT id, dag_id, cost FROM unlocked WHERE fits_alone AND fits AND has_lock AND dag_id IS NOT NULL
        UNION ALL
        SELECT id, dag_id, 0 FROM locked WHERE is_simple AND dag_id IS NOT NULL
    ) AS claimed
    CROSS JOIN chosen_account
    GROUP BY claimed.dag_id
),
-- DAGs whose first claim this is. Locked, so that of two claims only one logs it.
dag_first AS MATERIALIZED (
    SELECT id FROM lineshaft.dag WHERE id = ANY (ARRAY(SELECT id FROM dag_share)) AND status <> 'running' ORDER BY id FOR NO KEY UPDATE
),
-- The condition is checked again on the locked row: another claim may have been faster.
dag_reserved AS (
    UPDATE lineshaft.dag
    SET reserved_usd = dag.reserved_usd + share.needed,
        status = 'running', ended_at = NULL, account = coalesce(share.account, dag.account)
    FROM (SELECT id, needed, account FROM dag_share ORDER BY id) AS share
    WHERE dag.id = share.id AND (SELECT count(*) FROM dag_first) >= 0
      -- A running DAG without costs needs no update, and so no wait for its row.
      AND (share.needed > 0 OR dag.status <> 'running' OR dag.account <> share.account OR (dag.account IS NULL AND share.account IS NOT NULL))
      AND (dag.budget_ceiling_usd IS NULL OR dag.spent_usd + dag.reserved_usd + share.needed <= dag.budget_ceiling_usd)
    RETURNING dag.id
),
dags_with_money AS MATERIALIZED (SELECT jsonb_object_agg(id, true) AS ids FROM dag_reserved),
decided AS MATERIALIZED (
    SELECT
        unlocked.*,
        CASE
            WHEN NOT unlocked.fits_alone THEN 'dag_budget'
            -- In the next round, when it is known what the better ones leave.
            WHEN NOT unlocked.fits THEN 'later'
            -- Its DAG was created while this statement waited.
            WHEN unlocked.has_unseen_dag THEN 'contended'
            WHEN NOT unlocked.has_lock THEN 'lock'
            WHEN unlocked.dag_id IS NULL OR unlocked.cost = 0 THEN NULL
            WHEN (dags_with_money.ids ? unlocked.dag_id) IS NOT TRUE THEN 'contended'
        END AS obstacle
    FROM unlocked CROSS JOIN dags_with_money
),
-- A CTE of its own: where a row is newer than the snapshot, PostgreSQL checks it again together with the rows it is joined to. It keeps
-- those for a CTE, but not for the parts of a UNION ALL in FROM, which it would read again from the start: the row would be lost, but not
-- its money and lock.
claimable AS MATERIALIZED (
    SELECT id, chosen_model, cost, resume, effective, NULL::bigint AS lock_token, false AS has_slots FROM locked WHERE is_simple
    UNION ALL
    SELECT id, chosen_model, cost, resume, effective, lock_token,
        locks IS NOT NULL OR (is_limited AND coalesce((SELECT verdicts FROM admission) ? id, false))
    FROM decided WHERE obstacle IS NULL
),
moved AS (
    UPDATE lineshaft.task_live AS live
    SET parked = NULL,
        parked_key = NULL,
        lock_token = taken.lock_token,
        has_slots = taken.has_slots,
        account = chosen_account.by_task ->> taken.id,
        agent_reserved = funds.of_agent,
        day_reserved = funds.of_day,
        -- include: claimed_columns
    FROM claimable AS taken, me, funds, chosen_account
    WHERE live.id = taken.id
    RETURNING live.id, live.epoch, live.dag_id, live.model, live.account, live.attempts, live.rate_limits, live.cost_usd, live.reserved_usd,
        live.heartbeat_sec, live.limit_sec, live.submission_no, live.has_slots, taken.resume, taken.effective
),
slots_taken AS MATERIALIZED (
    SELECT lineshaft.take_slots_1(taken.ids, taken.epochs, admission.verdicts, (SELECT now FROM clock))
    FROM (SELECT array_agg(id) AS ids, array_agg(epoch) AS epochs FROM moved WHERE has_slots HAVING count(*) > 0) AS taken
    CROSS JOIN admission
),
parked AS (
    UPDATE lineshaft.task_live AS live
    -- Of several locks it waits for one at a time.
    SET parked = decided.obstacle, parked_key = NULL, lock_key = coalesce(decided.refused_key, live.lock_key)
    FROM decided
    WHERE live.id = decided.id AND decided.obstacle IN ('lock', 'dag_budget')
),
-- Other tasks that need a held lock would be found by every claim again: park them too, some thousands at a time. The lock can't be
-- released in the meantime: its row is locked by lock_granted.
rivals AS MATERIALIZED (
    SELECT rival.id
    FROM (
        SELECT coalesce(refused_key, lock_key) AS lock_key FROM decided
        WHERE lock_key IS NOT NULL GROUP BY 1 HAVING bool_or(obstacle = 'lock')
    ) AS contended
    CROSS JOIN LATERAL (
        SELECT id FROM lineshaft.task_live
        -- Of those with a fair_key only tasks behind another of their key: the others get their turns, and nothing stays behind them.
        WHERE status = 'READY' AND lock_key = contended.lock_key AND (parked IS NULL OR (parked = 'fair' AND parked_key IS NOT NULL))
          AND id <> ALL (ARRAY(SELECT decided.id FROM decided))
          -- The next child of the batch that has the lock doesn't wait.
          AND NOT EXISTS (
            SELECT FROM lineshaft.lock WHERE lock.key = contended.lock_key AND lock.holder_task_id = task_live.lock_owner
          )
          AND (lock_owner IS NULL OR admission IS NULL)
        LIMIT 2000
        FOR UPDATE SKIP LOCKED
    ) AS rival
),
rivals_parked AS (UPDATE lineshaft.task_live AS live SET parked = 'lock', parked_key = NULL FROM rivals WHERE live.id = rivals.id),
claimed AS MATERIALIZED (SELECT count(*) AS n, coalesce(sum(reserved_usd), 0) AS cost FROM moved),
counted AS (
    UPDATE lineshaft.instance
    SET held = held + claimed.n, busy_since = coalesce(busy_since, clock.now), last_heartbeat = clock.now, silence_reported = false
    FROM claimed, clock
    WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer AND claimed.n > 0
),
-- After everything that may wait, and without waiting itself: another claim that has the row locked writes the same.
account_used AS (
    UPDATE lineshaft.account SET used_at = clock.now
    FROM (
        SELECT account.name FROM lineshaft.account
        WHERE account.name = ANY (ARRAY(SELECT DISTINCT moved.account FROM moved WHERE moved.account IS NOT NULL))
        ORDER BY account.name
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS used
    CROSS JOIN clock
    WHERE account.name = used.name
),
agent_reserved AS (
    UPDATE lineshaft.agent
    SET reserved_usd = reserved_usd + claimed.cost
    FROM claimed, funds
    WHERE id = %(agent_id)s::text AND funds.of_agent AND claimed.cost > 0
),
day_reserved AS (
    UPDATE lineshaft.limits
    SET reserved_usd = reserved_usd + claimed.cost
    FROM claimed, funds
    WHERE funds.of_day AND claimed.cost > 0
),
logged AS (
    INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, agent_id, epoch, data)
    SELECT (SELECT now FROM clock), CASE WHEN %(start)s::boolean THEN '{task.claimed,task.started}' ELSE '{task.claimed}' END::text[],
        moved.id, moved.dag_id, %(agent_id)s::text, moved.epoch,
        -- A repeated completion finds the claim that it asked for (single.sql).
        CASE WHEN %(follows)s::text IS NOT NULL
            THEN jsonb_build_object('follows', jsonb_build_object('task_id', %(follows)s::text, 'epoch', %(follows_epoch)s::integer)) END
    FROM moved
    RETURNING seq
),
-- The cause first: the count enforces the order.
dag_logged AS (
    INSERT INTO lineshaft.event (at, kinds, dag_id, agent_id)
    SELECT clock.now, '{dag.running}', dag_first.id, %(agent_id)s::text
    FROM dag_reserved JOIN dag_first ON dag_first.id = dag_reserved.id CROSS JOIN clock
    WHERE (SELECT count(*) FROM logged) >= 0
)
SELECT
    moved.id, moved.epoch, moved.dag_id AS live_dag_id, task.lock_key, moved.model, moved.attempts, moved.rate_limits, moved.cost_usd, moved.limit_sec,
    coalesce(moved.heartbeat_sec, (SELECT heartbeat_interval_sec FROM me)) AS heartbeat_interval_sec,
    moved.resume, task.type, task.title, task.spec, task.inputs, task.dag_id, task.parent_id, task.deadline, task.max_attempts, task.max_cost_usd,
    task.require_decision_report,
    -- Its limits are not the present ones of its type; or a submission replaced it after this statement's snapshot, from which its spec is:
    -- the locked row then has another number than the row of the snapshot. It is given back. (The statements of one task read the spec later, and
    -- claim_fast finds only rows of its snapshot.)
    (
        -- include: is_outdated
        OR (task.idempotency_key IS NOT NULL AND moved.submission_no <> (
            SELECT before.submission_no FROM lineshaft.task_live AS before WHERE before.id = moved.id
        ))
    ) AS outdated, task.admission -> 'locks' AS locks,
    moved.account,
    -- The rest is about the whole claim, in the first row, which exists even when nothing was claimed.
    CASE WHEN moved.n IS NULL OR moved.n = 1 THEN (SELECT now FROM clock) END AS now,
    CASE WHEN moved.n IS NULL OR moved.n = 1 THEN (SELECT claim_ttl_sec FROM me) END AS claim_ttl_sec,
    coalesce((SELECT room > 0 FROM me), false) AS has_room,
    -- The agent has a budget, of which a task without max_cost_usd reserves nothing.
    (SELECT of_agent AND default_max_cost_usd IS NULL FROM funds) AS is_uncapped,
    -- There are tasks with a fair_key.
    (SELECT quota_kinds & 64 <> 0 FROM funds) AS has_fair,
    -- Whether there may be a task that another agent can claim, but not this one: it has no slot, no money, or no model that can be used now.
    CASE
        WHEN (SELECT room > 0 FROM me) IS NOT TRUE THEN true
        WHEN (moved.n IS NULL OR moved.n = 1) AND ((SELECT money FROM funds) IS NOT NULL OR (SELECT keys <> '{}' FROM barred)) THEN (
            -- It sees only tasks with a fair_key whose turn it is.
            SELECT quota_kinds & 64 <> 0 FROM funds
        ) OR EXISTS (
            SELECT FROM suitable WHERE NOT suitable.is_eligible
        ) OR EXISTS (
            SELECT
            FROM suitable
            CROSS JOIN LATERAL (
                SELECT lineshaft.attempt_limit_1(max_cost_usd, max_total_cost_usd, cost_usd) AS limit_usd FROM lineshaft.task_live
                WHERE status = 'READY' AND parked IS NULL AND generation = suitable.generation AND lane_id = suitable.id
                ORDER BY rank, submission_no
                LIMIT 100
                OFFSET 0
            ) AS next
            WHERE suitable.is_scarce AND NOT lineshaft.affords_1((SELECT money FROM funds), next.limit_usd, NULL)
        )
        ELSE false
    END AS leaves_some,
    -- The caller looks again if some tasks were in the way of others: parked by now, or too expensive together with those before them ...
    CASE
        WHEN moved.n IS NULL OR moved.n = 1 THEN
            (SELECT count(*) FROM locked WHERE NOT is_simple) > (SELECT count(*) FROM decided WHERE obstacle IS NULL)
    END AS again,
    -- ... and into other lanes, if other claims were just taking the best tasks ...
    CASE
        WHEN (moved.n IS NULL OR moved.n = 1) AND (SELECT count(*) FROM head) > 1 THEN ARRAY(
            SELECT part FROM (SELECT part, n FROM quota UNION ALL SELECT part, -1 FROM locked) AS taken GROUP BY part HAVING sum(n) > 0
        )
        ELSE '{}'
    END AS contested,
    -- ... and a little later, if other transactions hold everything: the tasks may stay READY without a notification ...
    CASE
        WHEN moved.n IS NULL THEN EXISTS (
            SELECT
            FROM quota
            CROSS JOIN LATERAL (
                SELECT FROM lineshaft.task_live
                WHERE status = 'READY' AND parked IS NULL AND generation = quota.generation AND lane_id = quota.id
                LIMIT 1
                OFFSET 0
            ) AS there
            WHERE NOT EXISTS (SELECT FROM locked WHERE locked.part = quota.part)
        )
        ELSE false
    END AS missed,
    -- ... and if tasks got their document lock, but another claim was faster with their DAG's money.
    CASE
        WHEN moved.n IS NULL OR moved.n = 1 THEN
            ARRAY(SELECT id FROM decided WHERE obstacle = 'contended' AND lock_key IS NOT NULL AND (lock_owner IS NULL OR locks IS NOT NULL))
    END AS stranded,
    -- ... and what quotas count for tasks that were parked for them, or not claimed for another reason; it looks at those after the commit.
    CASE
        WHEN (SELECT verdicts FROM admission) IS NOT NULL AND (moved.n IS NULL OR moved.n = 1) AND (SELECT count(*) FROM slots_taken) >= 0 THEN ARRAY(
            SELECT DISTINCT counted.name
            FROM jsonb_each((SELECT verdicts FROM admission)) AS verdict (id, value)
            CROSS JOIN LATERAL jsonb_array_elements_text(verdict.value -> 'names') AS counted (name)
            WHERE verdict.id <> ALL (ARRAY(SELECT id FROM moved))
        )
    END AS looks,
    -- ... and if other waiters for a lock may be able to go on: a task that was woken for it waits for another one now, or it is shared.
    CASE
        WHEN moved.n IS NULL OR moved.n = 1 THEN ARRAY(
            SELECT lock_key FROM decided WHERE obstacle = 'lock' AND refused_key <> lock_key
            UNION
            SELECT other.key FROM taken_together, jsonb_each(tasks) AS task, jsonb_array_elements_text(task.value -> 2) AS other (key)
        )
    END AS passed_on,
    -- ... and if a breaker may be probed with a task that this agent could claim.
    CASE
        WHEN (moved.n IS NULL OR moved.n = 1) AND EXISTS (SELECT FROM due_breaker) AND (SELECT room > 0 FROM me) THEN EXISTS (
            SELECT
            FROM found
            CROSS JOIN me
            CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = found.lane_id OFFSET 0) AS lane
            CROSS JOIN due_breaker
            WHERE (
                lane.type = due_breaker.key
                OR (due_breaker.key LIKE 'model:%%' AND substr(due_breaker.key, 7) = ANY (
                    CASE WHEN lane.models = '{}' THEN me.models_available[1:1] ELSE lane.models END
                ))
                OR (due_breaker.key LIKE 'account:%%' AND substr(due_breaker.key, 9) = ANY (me.accounts))
            )
              AND lineshaft.suits_1(lane.type, lane.required_capabilities, lane.models, me.types, me.capabilities, me.models_available)
              AND (%(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[]))
        )
        ELSE false
    END AS probe_due,
    -- ... and if a delay has passed that the promoter has not seen yet.
    CASE
        WHEN (moved.n IS NULL OR moved.n = 1) AND (SELECT room FROM me) > (SELECT count(*) FROM moved) THEN (
            SELECT true FROM lineshaft.task_live
            WHERE status IN ('PENDING', 'RETRYING') AND due_at IS NOT NULL AND due_at <= (SELECT now FROM clock)
            ORDER BY due_at LIMIT 1
        ) IS TRUE
        ELSE false
    END AS due,
    -- The end of the longest slowdown that concerns this instance.
    CASE
        WHEN moved.n IS NULL OR moved.n = 1 THEN (
            SELECT
            -- include: slowdown_until
            FROM me
        )
    END AS slowdown_until
FROM (VALUES (1)) AS always
LEFT JOIN (
    (SELECT *, row_number() OVER (ORDER BY effective, submission_no) AS n FROM moved) AS moved
    JOIN lineshaft.task ON task.id = moved.id
) ON true
ORDER BY moved.n

-- name: instance_exists
SELECT incarnation FROM lineshaft.instance WHERE agent_id = %(agent_id)s::text AND incarnation = %(incarnation)s::integer

-- name: free_stranded
-- Locks of tasks that weren't claimed in the end; unless another claim has taken them since.
SELECT DISTINCT freed.key
FROM (
    SELECT array_agg(needed.key) AS keys, array_agg(idle.id) AS holders
    FROM (
        SELECT id, lock_key, admission FROM lineshaft.task_live WHERE id = ANY (%(ids)s::text[]) AND status = 'READY' ORDER BY id FOR UPDATE
    ) AS idle
    CROSS JOIN LATERAL unnest(lineshaft.lock_keys_1(idle.lock_key, idle.admission)) AS needed (key)
) AS held
CROSS JOIN LATERAL lineshaft.release_locks_1(held.keys, held.holders, NULL, NULL) AS freed

-- name: resumed
-- What earlier attempts left behind, for tasks that were started before.
SELECT task.id,
    (SELECT checkpoint.data FROM lineshaft.checkpoint WHERE checkpoint.task_id = task.id) AS checkpoint,
    (SELECT jsonb_object_agg(step.name, step.data) FROM lineshaft.step WHERE step.task_id = task.id) AS steps,
    (SELECT jsonb_object_agg(step.name, step.digest) FROM lineshaft.step WHERE step.task_id = task.id) AS step_digests,
    -- A task that has completed since, and is rerun, has none.
    (SELECT CASE WHEN attempt.outcome = 'failed' THEN jsonb_build_object('category', attempt.category, 'error', attempt.error) END
     FROM lineshaft.attempt
     WHERE attempt.task_id = task.id AND attempt.outcome IN ('failed', 'completed') ORDER BY attempt.epoch DESC LIMIT 1) AS last_error,
    (SELECT jsonb_agg(
        jsonb_build_object('id', signal.id, 'name', signal.name, 'data', signal.data, 'at', lineshaft.iso(signal.at)) ORDER BY signal.no
     )
     FROM lineshaft.signal WHERE signal.task_id = task.id AND signal.received_at IS NULL) AS signals,
    (SELECT jsonb_object_agg(child.id, jsonb_build_object('status', coalesce(ended.status, live.status)::text, 'output', ended.output))
     FROM lineshaft.edge
     JOIN lineshaft.task AS child ON child.id = edge.depends_on
     LEFT JOIN lineshaft.task_end AS ended ON ended.id = child.id
     LEFT JOIN lineshaft.task_live AS live ON live.id = child.id
     WHERE edge.task_id = task.id AND edge.kind = 'ended') AS children
FROM lineshaft.task WHERE task.id = ANY (%(ids)s::text[])

-- name: inputs
-- The outputs that are inputs of claimed tasks: of each reader, which is a task or several with the same inputs, the first ones, as long as
-- they are not too large together. The size is that of the stored form, which may be compressed: reading it reads no output.
WITH wanted AS (
    SELECT wanted.reader, wanted.id, wanted.n, coalesce(pg_column_size(ended.output), 0) AS size
    FROM unnest(%(readers)s::integer[], %(ids)s::text[]) WITH ORDINALITY AS wanted (reader, id, n)
    LEFT JOIN lineshaft.task_end AS ended ON ended.id = wanted.id
),
summed AS (
    SELECT wanted.id, sum(wanted.size) OVER (PARTITION BY wanted.reader ORDER BY wanted.n) AS total
    FROM wanted
),
fitting AS (SELECT DISTINCT summed.id FROM summed WHERE summed.total <= %(most)s::bigint)
SELECT fitting.id, ended.output FROM fitting LEFT JOIN lineshaft.task_end AS ended ON ended.id = fitting.id

-- name: past_attempts
-- How earlier attempts ended, also before the last revival.
SELECT task_id, number, agent_id, instance, model, outcome, category, error, started_at, ended_at, cost_usd
FROM lineshaft.attempt
WHERE task_id = ANY (%(ids)s::text[]) AND outcome <> 'validating'
ORDER BY task_id, epoch

-- name: lock_due_breakers
-- Breakers that may be probed, for one claim at a time: a claim that doesn't get the advisory lock leaves the breaker to the other one. It
-- never waits for the lock, which ends with the transaction.
WITH due AS MATERIALIZED (
    SELECT key FROM lineshaft.breaker
    WHERE state <> 'closed' AND NOT forced AND probe_task_id IS NULL AND probe_at < coalesce(%(now)s::timestamptz, now())
    ORDER BY key
)
SELECT key FROM due WHERE pg_try_advisory_xact_lock(hashtextextended('lineshaft.breaker ' || key, 0))

-- name: changed_task
-- The task of a type in `probing` that was changed and retried first, among the next thousand of each lane.
SELECT live.id
FROM lineshaft.lane
CROSS JOIN lineshaft.generation
CROSS JOIN LATERAL (
    SELECT id, revivals
    FROM lineshaft.task_live
    WHERE status = 'READY' AND parked IS NULL AND generation = generation.no AND lane_id = lane.id
    ORDER BY rank, submission_no
    LIMIT 1000
    OFFSET 0
) AS live
CROSS JOIN LATERAL (
    SELECT resolution, reviewed_at FROM lineshaft.dead_letter WHERE task_id = live.id AND revival = live.revivals - 1 OFFSET 0
) AS letter
WHERE lane.type = ANY (%(probing)s::text[]) AND (%(types)s::text[] IS NULL OR lane.type = ANY (%(types)s::text[]))
  AND letter.resolution = 'modify_and_retry'
ORDER BY letter.reviewed_at
LIMIT 1

-- name: existing_tasks
SELECT id FROM lineshaft.task WHERE id = ANY (%(ids)s::text[])

-- name: claim_holders
-- The holders of claims that are held, that ended their task, or that ended as an attempt.
SELECT DISTINCT ON (input.id, input.epoch) input.id, input.epoch, coalesce(live.agent_id, ended.agent_id, attempt.agent_id) AS agent_id,
    coalesce(live.incarnation, ended.incarnation, attempt.incarnation) AS incarnation
FROM unnest(%(ids)s::text[], %(epochs)s::integer[]) AS input (id, epoch)
LEFT JOIN lineshaft.task_live AS live ON live.id = input.id AND live.epoch = input.epoch
LEFT JOIN lineshaft.task_end AS ended ON ended.id = input.id AND ended.epoch = input.epoch
LEFT JOIN lineshaft.attempt ON attempt.task_id = input.id AND attempt.epoch = input.epoch
WHERE coalesce(live.agent_id, ended.agent_id, attempt.agent_id) IS NOT NULL

-- name: over_total
-- Those of these tasks that have cost as much as all their attempts together may.
SELECT task.id FROM lineshaft.task JOIN unnest(%(ids)s::text[], %(costs)s::numeric[]) AS paid (id, cost) ON paid.id = task.id
WHERE task.max_total_cost_usd <= paid.cost

-- name: lock_turns
-- One claim at a time makes turns, until it commits.
SELECT pg_advisory_xact_lock(hashtextextended('lineshaft.turns', 0))

-- name: make_turns
SELECT ids, lanes, keys, names, is_cut FROM lineshaft.make_turns_1(
    %(agent_id)s::text, %(incarnation)s::integer, %(limit)s::integer, %(types)s::text[], %(probing)s::text[], %(idle_lanes)s::integer[],
    %(ahead)s::integer, coalesce(%(now)s::timestamptz, clock_timestamp())
)

-- name: finish_turns
SELECT lineshaft.finish_turns_1(%(ids)s::text[], %(lanes)s::integer[], %(keys)s::text[]) AS lanes
