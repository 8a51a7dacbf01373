"""What must hold of the tables after any sequence of operations."""

from typing import Any, LiteralString

import psycopg

#: Each statement gives the rows that break the rule it is named after. Locks `lost:…` are those that a test
#: lets expire under their holder.
RULES: dict[str, LiteralString] = {
    "every artifact has its content": """
        SELECT artifact.id FROM lineshaft.artifact
        LEFT JOIN lineshaft.content ON content.sha256 = artifact.sha256
        WHERE content.stored IS NOT TRUE OR content.size <> artifact.size
    """,
    "every reference has its artifact": """
        SELECT task_id, artifact_id FROM lineshaft.artifact_ref
        WHERE NOT EXISTS (SELECT FROM lineshaft.artifact WHERE artifact.id = artifact_ref.artifact_id)
    """,
    "every task is either live or ended": """
        SELECT task.id FROM lineshaft.task
        WHERE 1 <> (SELECT count(*) FROM lineshaft.task_live WHERE id = task.id)
                 + (SELECT count(*) FROM lineshaft.task_end WHERE id = task.id)
    """,
    "no state without its task": """
        SELECT id
        FROM (SELECT id FROM lineshaft.task_live UNION ALL SELECT id FROM lineshaft.task_end) AS state
        WHERE NOT EXISTS (SELECT FROM lineshaft.task WHERE task.id = state.id)
    """,
    "every live task has a lane": """
        SELECT live.id, live.lane_id FROM lineshaft.task_live AS live
        WHERE NOT EXISTS (SELECT FROM lineshaft.lane WHERE lane.id = live.lane_id)
    """,
    "a task costs what its lane says": """
        SELECT live.id, attempt.limit_usd, lane.cost_from_usd FROM lineshaft.task_live AS live
        JOIN lineshaft.lane ON lane.id = live.lane_id
        JOIN lineshaft.task ON task.id = live.id
        CROSS JOIN LATERAL (
            SELECT least(live.max_cost_usd, live.max_total_cost_usd - live.cost_usd) AS limit_usd
        ) AS attempt
        WHERE live.max_cost_usd IS DISTINCT FROM task.max_cost_usd
           OR live.max_total_cost_usd IS DISTINCT FROM task.max_total_cost_usd
           OR (attempt.limit_usd IS NULL) <> (lane.cost_from_usd IS NULL)
           -- A late report, a gate or a correction may have changed what is left since it was given its lane.
           OR ((live.max_total_cost_usd IS NULL OR live.epoch = 0) AND NOT (
            attempt.limit_usd >= lane.cost_from_usd
            AND (attempt.limit_usd < 2 * lane.cost_from_usd OR attempt.limit_usd = 0)
           ))
    """,
    "claims look at fair shares while there are tasks with a fair_key": """
        SELECT live.id FROM lineshaft.task_live AS live CROSS JOIN lineshaft.limits
        WHERE live.admission ? 'fair' AND limits.quota_kinds & 64 = 0
    """,
    "a held task has a slot of each quota of its keys": """
        SELECT held.id, limiting.quota, limiting.key FROM lineshaft.task_live AS held
        JOIN lineshaft.lane ON lane.id = held.lane_id
        JOIN lineshaft.task ON task.id = held.id
        CROSS JOIN LATERAL lineshaft.quotas_of_1(
            lineshaft.lane_keys_1(lane.type, held.model, held.account, held.agent_id)
            || lineshaft.parking_keys_1(held.admission, task.tags)
        ) AS limiting
        LEFT JOIN lineshaft.slot ON slot.quota = limiting.quota AND slot.key = limiting.key
            AND slot.task_id = held.id AND slot.epoch = held.epoch
        WHERE held.lease_until IS NOT NULL AND limiting.max_running IS NOT NULL
          AND (slot.task_id IS NULL OR NOT held.has_slots)
    """,
    "a slot that counts is one of a quota of its task": """
        SELECT held.id, slot.quota, slot.key FROM lineshaft.slot
        JOIN lineshaft.task_live AS held ON held.id = slot.task_id AND held.epoch = slot.epoch
        JOIN lineshaft.lane ON lane.id = held.lane_id
        JOIN lineshaft.task ON task.id = held.id
        WHERE held.lease_until IS NOT NULL AND NOT EXISTS (
            SELECT FROM lineshaft.quotas_of_1(
                lineshaft.lane_keys_1(lane.type, held.model, held.account, held.agent_id)
                || lineshaft.parking_keys_1(held.admission, task.tags)
            ) AS limiting
            WHERE limiting.quota = slot.quota AND limiting.key = slot.key
        )
    """,
    # A rate may have room again: the duty's next tick.
    "a task is parked for a quota only while that has no room, or another of its lane is next": """
        SELECT live.id, live.parked_key FROM lineshaft.task_live AS live
        CROSS JOIN LATERAL (
            SELECT split_part(live.parked_key, chr(31), 1) AS quota,
                substr(live.parked_key, strpos(live.parked_key, chr(31)) + 1) AS key
        ) AS waits
        LEFT JOIN lineshaft.quota ON quota.name = waits.quota
        WHERE live.parked = 'quota' AND quota.rate_unit IS NULL
          AND coalesce(quota.max_running > lineshaft.slots_held_1(waits.quota, waits.key, NULL), true)
          AND NOT EXISTS (
            SELECT FROM lineshaft.task_live AS next JOIN lineshaft.task ON task.id = next.id
            CROSS JOIN LATERAL lineshaft.quotas_of_1(
                lineshaft.parking_keys_1(next.admission, task.tags)
            ) AS limiting
            WHERE next.status = 'READY' AND next.parked IS NULL AND next.lane_id = live.lane_id
              AND limiting.quota = waits.quota AND limiting.key = waits.key
          )
    """,
    "what tasks wait for is looked at again": """
        SELECT live.id, live.parked_key FROM lineshaft.task_live AS live
        WHERE live.parked = 'quota' AND NOT EXISTS (
            SELECT FROM lineshaft.quota_wake
            WHERE lineshaft.quota_name_1(quota_wake.quota, quota_wake.key) = live.parked_key
        )
    """,
    "blocked counts the open edges": """
        SELECT live.id, live.blocked FROM lineshaft.task_live AS live
        WHERE live.blocked <> (
            SELECT count(*) FROM lineshaft.edge WHERE edge.task_id = live.id AND NOT edge.satisfied
        )
    """,
    "nothing READY waits for another": """
        SELECT live.id FROM lineshaft.task_live AS live
        JOIN lineshaft.edge ON edge.task_id = live.id AND NOT edge.satisfied
        WHERE live.status NOT IN ('PENDING')
    """,
    "a task that others wait for without a DAG is marked": """
        SELECT live.id FROM lineshaft.task_live AS live JOIN lineshaft.edge ON edge.depends_on = live.id
        WHERE NOT edge.satisfied AND live.dag_id IS NULL AND NOT live.awaited
    """,
    "no edge stays open behind an end that satisfies it": """
        SELECT edge.* FROM lineshaft.edge JOIN lineshaft.task_end AS ended ON ended.id = edge.depends_on
        WHERE NOT edge.satisfied AND (ended.status = 'COMPLETED' OR edge.kind = 'ended')
    """,
    # A batch waits for its children; what it depends on itself, its first child waits for.
    "no live task has gone ahead of one that it needs": """
        SELECT edge.* FROM lineshaft.edge
        JOIN lineshaft.task_live AS live ON live.id = edge.task_id AND NOT live.is_batch
        JOIN lineshaft.task ON task.id = edge.depends_on
        LEFT JOIN lineshaft.task_end AS ended ON ended.id = edge.depends_on
        WHERE edge.satisfied AND edge.kind = 'success' AND ended.status IS DISTINCT FROM 'COMPLETED'
    """,
    "an attempt that completed was followed by a rerun, or a gate has checked its output": """
        SELECT attempt.task_id, attempt.epoch FROM lineshaft.attempt
        LEFT JOIN lineshaft.task_end AS ended ON ended.id = attempt.task_id AND ended.epoch = attempt.epoch
        JOIN lineshaft.task ON task.id = attempt.task_id
        WHERE attempt.outcome = 'completed'
          AND CASE
            WHEN ended.id IS NULL THEN attempt.output IS NULL
            -- One that was cancelled before its next claim still has this epoch.
            ELSE attempt.output IS NOT NULL AND ended.status = 'COMPLETED'
          END
    """,
    "a batch is never claimed": """
        SELECT id, status FROM lineshaft.task_live WHERE is_batch AND status <> 'PENDING'
    """,
    "an instance holds what its rows say": """
        SELECT instance.agent_id, instance.incarnation, instance.held FROM lineshaft.instance
        LEFT JOIN lineshaft.task_live AS live
            ON live.agent_id = instance.agent_id AND live.incarnation = instance.incarnation
        GROUP BY instance.agent_id, instance.incarnation, instance.held
        HAVING instance.held <> count(live.id)
    """,
    "a held task has an instance": """
        SELECT live.id, live.agent_id, live.incarnation FROM lineshaft.task_live AS live
        LEFT JOIN lineshaft.instance
            ON instance.agent_id = live.agent_id AND instance.incarnation = live.incarnation
        WHERE live.agent_id IS NOT NULL AND instance.agent_id IS NULL
    """,
    "an agent has reserved what its rows say": """
        SELECT agent.id, agent.reserved_usd FROM lineshaft.agent
        LEFT JOIN (
            SELECT agent_id, reserved_usd FROM lineshaft.task_live WHERE agent_reserved
            UNION ALL
            SELECT agent_id, reserved_usd FROM lineshaft.gate_run WHERE agent_reserved
        ) AS held ON held.agent_id = agent.id
        GROUP BY agent.id, agent.reserved_usd
        HAVING agent.reserved_usd <> coalesce(sum(held.reserved_usd), 0)
    """,
    "the day has reserved what its rows say": """
        SELECT limits.reserved_usd FROM lineshaft.limits
        WHERE limits.reserved_usd <> (
            SELECT coalesce(sum(reserved_usd), 0) FROM lineshaft.task_live WHERE day_reserved
        ) + (SELECT coalesce(sum(reserved_usd), 0) FROM lineshaft.gate_run WHERE day_reserved)
    """,
    "a DAG has reserved what its tasks have": """
        SELECT dag.id, dag.reserved_usd FROM lineshaft.dag
        LEFT JOIN (
            SELECT dag_id, reserved_usd FROM lineshaft.task_live
            UNION ALL
            SELECT task.dag_id, gate_run.reserved_usd FROM lineshaft.gate_run
            JOIN lineshaft.task ON task.id = gate_run.task_id
        ) AS held ON held.dag_id = dag.id
        GROUP BY dag.id, dag.reserved_usd
        HAVING dag.reserved_usd <> coalesce(sum(held.reserved_usd), 0)
    """,
    "a DAG counts its tasks": """
        SELECT dag.* FROM lineshaft.dag CROSS JOIN LATERAL (
            SELECT count(*) AS total,
                count(*) FILTER (WHERE ended.status = 'COMPLETED') AS completed,
                count(*) FILTER (WHERE ended.status = 'CANCELLED') AS cancelled,
                count(*) FILTER (WHERE ended.status = 'DEAD_LETTERED') AS dead_lettered
            FROM lineshaft.task LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
            WHERE task.dag_id = dag.id
        ) AS actual
        WHERE (dag.total, dag.completed, dag.cancelled, dag.dead_lettered)
            IS DISTINCT FROM (actual.total, actual.completed, actual.cancelled, actual.dead_lettered)
    """,
    "a DAG has spent what its tasks cost": """
        SELECT dag.id, dag.spent_usd, sum(cost) FROM lineshaft.dag
        JOIN lineshaft.task ON task.dag_id = dag.id
        CROSS JOIN LATERAL (
            -- What a running attempt spends above its reservation is booked at once.
            SELECT cost_usd + CASE
                WHEN agent_id IS NOT NULL THEN greatest(attempt_cost_usd - reserved_usd, 0) ELSE 0
            END AS cost
            FROM lineshaft.task_live WHERE id = task.id
            UNION ALL
            SELECT cost_usd FROM lineshaft.task_end WHERE id = task.id
        ) AS state
        GROUP BY dag.id, dag.spent_usd
        HAVING dag.spent_usd <> sum(cost)
    """,
    "a task costs what its claims reported and people corrected": """
        SELECT task.id, state.cost_usd, corrected.usd AS corrected_usd, reported.usd AS reported_usd
        FROM lineshaft.task
        CROSS JOIN LATERAL (
            -- While its agent holds a task, the row of an attempt repeats what the live row has.
            SELECT cost_usd, CASE WHEN agent_id IS NOT NULL THEN epoch END AS held_epoch, false AS has_more
            FROM lineshaft.task_live WHERE id = task.id
            UNION ALL
            -- The claim that completed it has no row unless a gate checked its output.
            SELECT cost_usd, NULL, status = 'COMPLETED' AND NOT EXISTS (
                SELECT FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch = ended.epoch
            )
            FROM lineshaft.task_end AS ended WHERE id = task.id
        ) AS state
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(cost_usd), 0) AS usd FROM lineshaft.attempt
            WHERE attempt.task_id = task.id AND attempt.epoch IS DISTINCT FROM state.held_epoch
        ) AS reported
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(amount_usd), 0) AS usd FROM lineshaft.cost_correction WHERE task_id = task.id
        ) AS corrected
        WHERE CASE
            WHEN state.has_more THEN state.cost_usd - corrected.usd < reported.usd
            ELSE state.cost_usd - corrected.usd <> reported.usd
        END
    """,
    "what a claim reports counts up to its ceiling": """
        SELECT dispute.*, claim.cost_usd FROM lineshaft.cost_dispute AS dispute
        CROSS JOIN LATERAL (
            SELECT attempt_cost_usd AS cost_usd FROM lineshaft.task_live AS live
            WHERE live.id = dispute.task_id AND live.epoch = dispute.epoch
            UNION ALL
            SELECT attempt.cost_usd - attempt.gate_cost_usd FROM lineshaft.attempt
            WHERE attempt.task_id = dispute.task_id AND attempt.epoch = dispute.epoch
        ) AS claim
        WHERE claim.cost_usd > dispute.ceiling_usd
    """,
    "live tasks know their DAG once it is real": """
        SELECT live.id, live.dag_id FROM lineshaft.task_live AS live
        JOIN lineshaft.task ON task.id = live.id
        LEFT JOIN lineshaft.dag ON dag.id = task.dag_id
        WHERE live.dag_id IS DISTINCT FROM dag.id
    """,
    "a DAG's status is what U7 says": """
        WITH RECURSIVE stuck AS (
            SELECT edge.task_id AS id FROM lineshaft.edge
            JOIN lineshaft.task_end AS ended ON ended.id = edge.depends_on
            WHERE NOT edge.satisfied
            UNION
            SELECT edge.task_id FROM stuck JOIN lineshaft.edge ON edge.depends_on = stuck.id
            WHERE NOT edge.satisfied
        )
        SELECT dag.id, dag.status, verdict.* FROM lineshaft.dag CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE live.id IS NULL) = count(*) AS over,
                count(*) FILTER (WHERE ended.status = 'DEAD_LETTERED') > 0
                    -- A task that was cancelled alone blocks what waits for it, too.
                    OR (count(live.id) > 0 AND count(*) FILTER (WHERE ended.status = 'CANCELLED') > 0)
                    AS dead,
                -- Not tolerated by its parent, which has completed or spawned it with on_failure = ignore.
                count(*) FILTER (
                    WHERE ended.status = 'DEAD_LETTERED' AND NOT task.ignore_failure
                      AND parent.status IS DISTINCT FROM 'COMPLETED'
                ) > 0 AS blocking,
                count(*) FILTER (WHERE ended.status = 'COMPLETED') = 0 AS all_cancelled,
                count(*) FILTER (WHERE live.epoch > 0) > 0 AS claimed,
                count(*) FILTER (WHERE live.id IS NOT NULL AND live.id NOT IN (SELECT id FROM stuck)) > 0
                    AS can_run
            FROM lineshaft.task
            LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
            LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
            LEFT JOIN lineshaft.task_end AS parent ON parent.id = task.parent_id
            WHERE task.dag_id = dag.id
        ) AS verdict
        WHERE NOT CASE
            WHEN verdict.dead AND NOT verdict.can_run AND (verdict.blocking OR NOT verdict.over)
                THEN dag.status = 'failed'
            WHEN verdict.over AND verdict.all_cancelled THEN dag.status = 'cancelled'
            WHEN verdict.over THEN dag.status = 'completed'
            WHEN verdict.claimed THEN dag.status = 'running'
            -- A failed DAG that a task has joined runs again when that task is claimed.
            ELSE dag.status IN ('pending', 'running') OR (dag.status = 'failed' AND verdict.dead)
        END
    """,
    "a lock is held by a task in an agent's hands, or by a batch with work left": """
        SELECT held.*
        FROM (
            SELECT key, holder_task_id FROM lineshaft.lock WHERE NOT holder_task_id LIKE 'shared:%'
            UNION ALL
            SELECT key, holder_task_id FROM lineshaft.lock_share
        ) AS held
        LEFT JOIN lineshaft.task_live AS live ON live.id = held.holder_task_id
        WHERE held.key NOT LIKE 'lost:%' AND held.holder_task_id NOT LIKE 'outside:%' AND (
            live.id IS NULL OR NOT held.key = ANY (lineshaft.lock_keys_1(live.lock_key, live.admission))
            OR NOT (live.is_batch OR live.agent_id IS NOT NULL)
        )
    """,
    "a lock is either one task's or its readers'": """
        SELECT key, lock.holder_task_id, share.holder_task_id
        FROM lineshaft.lock FULL JOIN lineshaft.lock_share AS share USING (key)
        WHERE (lock.holder_task_id LIKE 'shared:%') IS DISTINCT FROM (share.holder_task_id IS NOT NULL)
    """,
    "a task that runs under locks holds all of them": """
        SELECT live.id, needed.key FROM lineshaft.task_live AS live
        CROSS JOIN lineshaft.locks_of_1(
            live.id, live.lock_owner, live.lock_key, live.admission -> 'locks'
        ) AS needed
        LEFT JOIN lineshaft.lock ON lock.key = needed.key
        LEFT JOIN lineshaft.lock_share AS share
            ON share.key = needed.key AND share.holder_task_id = needed.holder
        WHERE live.agent_id IS NOT NULL AND needed.key NOT LIKE 'lost:%' AND (
            CASE WHEN needed.is_shared THEN share.holder_task_id ELSE lock.holder_task_id END
                IS DISTINCT FROM needed.holder
            OR CASE WHEN needed.is_shared THEN share.token ELSE lock.token END
                IS DISTINCT FROM live.lock_token
        )
    """,
    "no task waits for a lock that it can have unless another one comes first": """
        SELECT live.id, live.lock_key FROM lineshaft.task_live AS live
        WHERE live.parked = 'lock'
          AND NOT EXISTS (
            SELECT FROM lineshaft.lock
            WHERE lock.key = live.lock_key AND (NOT lock.holder_task_id LIKE 'shared:%' OR EXISTS (
                SELECT FROM lineshaft.task_live AS writer
                WHERE writer.parked = 'lock' AND writer.lock_key = lock.key
                  AND (writer.admission -> 'locks' ->> writer.lock_key) IS DISTINCT FROM 'true'
            ))
          )
          AND NOT EXISTS (
            SELECT FROM lineshaft.task_live AS head
            WHERE head.lock_key = live.lock_key AND head.status = 'READY' AND head.parked IS NULL
          )
    """,
    "a batch's own lock never keeps its children waiting": """
        SELECT live.id, live.lock_key FROM lineshaft.task_live AS live
        CROSS JOIN lineshaft.locks_of_1(
            live.id, live.lock_owner, live.lock_key, live.admission -> 'locks'
        ) AS needed
        JOIN lineshaft.lock ON lock.key = needed.key AND lock.holder_task_id = needed.holder
        WHERE live.parked = 'lock' AND needed.key = live.lock_key
    """,
    "a key in force names a task that is not cancelled or dead": """
        SELECT task_key.* FROM lineshaft.task_key
        LEFT JOIN lineshaft.task ON task.id = task_key.task_id AND task.idempotency_key = task_key.key
        LEFT JOIN lineshaft.task_end AS ended ON ended.id = task_key.task_id
        WHERE task_key.expires_at IS NULL
          AND (task.id IS NULL OR ended.status IN ('CANCELLED', 'DEAD_LETTERED'))
    """,
    "a dead letter lies on the review desk": """
        SELECT ended.id FROM lineshaft.task_end AS ended
        WHERE ended.status = 'DEAD_LETTERED' AND NOT EXISTS (
            SELECT FROM lineshaft.dead_letter
            WHERE dead_letter.task_id = ended.id AND dead_letter.epoch = ended.epoch
        )
    """,
    "a wait is not recorded yet": """
        SELECT wait.task_id, wait.name FROM lineshaft.wait
        JOIN lineshaft.step ON step.task_id = wait.task_id AND step.name = wait.name
    """,
    "waits and signals belong to tasks": """
        SELECT task_id, name FROM lineshaft.wait
        WHERE NOT EXISTS (SELECT FROM lineshaft.task WHERE task.id = wait.task_id)
        UNION ALL
        SELECT task_id, name FROM lineshaft.signal
        WHERE NOT EXISTS (SELECT FROM lineshaft.task WHERE task.id = signal.task_id)
    """,
    "a task that sleeps or waits for a signal is due at the end of its wait": """
        SELECT live.id, live.due_at, wait.until FROM lineshaft.task_live AS live
        JOIN lineshaft.wait ON wait.task_id = live.id AND wait.epoch = live.epoch
        WHERE live.status = 'PENDING' AND live.blocked = 0
          AND (live.due_at IS NULL OR abs(extract(epoch FROM live.due_at - wait.until)) > 0.001)
    """,
    "no task waits for a signal that has come": """
        SELECT live.id, wait.name FROM lineshaft.task_live AS live
        JOIN lineshaft.wait ON wait.task_id = live.id AND wait.epoch = live.epoch
        JOIN lineshaft.signal ON signal.task_id = live.id AND signal.name = wait.signal
        WHERE live.status = 'PENDING' AND live.due_at IS NOT NULL AND signal.received_at IS NULL
    """,
    "a signal is received once, and then without its data": """
        SELECT task_id, id FROM lineshaft.signal WHERE received_at IS NOT NULL AND data IS NOT NULL
        UNION ALL
        SELECT step.task_id, step.data->'signal'->>'id' FROM lineshaft.step
        WHERE step.data->'signal'->>'id' IS NOT NULL
        GROUP BY 1, 2 HAVING count(*) > 1
    """,
    "the children of a list have the positions from 0 on": """
        SELECT task_id, array_agg(position) FROM (
            SELECT edge.task_id, (child.inputs->'index'->>'value')::integer AS position FROM lineshaft.edge
            JOIN lineshaft.task AS batch ON batch.id = edge.task_id AND batch.for_each IS NOT NULL
            JOIN lineshaft.task AS child ON child.id = edge.depends_on AND child.parent_id = batch.id
        ) AS child
        GROUP BY task_id
        HAVING (min(position), max(position), count(DISTINCT position)) <> (0, count(*) - 1, count(*))
    """,
    # One that a person retries or reruns doesn't wait for its turn.
    "no more children of a list run than it allows": """
        SELECT batch.id, count(*) FROM lineshaft.task AS batch
        JOIN lineshaft.edge ON edge.task_id = batch.id
        JOIN lineshaft.task AS child ON child.id = edge.depends_on AND child.parent_id = batch.id
        JOIN lineshaft.task_live AS live ON live.id = child.id AND live.status <> 'PENDING'
        WHERE batch.for_each->>'concurrency' IS NOT NULL
        GROUP BY batch.id
        HAVING count(*) > (batch.for_each->>'concurrency')::integer AND max(live.revivals) = 0
    """,
    "every task was created once": """
        SELECT task.id FROM lineshaft.task
        WHERE 1 <> (SELECT count(*) FROM lineshaft.events WHERE task_id = task.id AND kind = 'task.created')
    """,
    # A DAG that the test has written by hand, without its tasks' events, is left out.
    "each DAG was created once, and its last event is its status": """
        SELECT dag.id, dag.status, story.kinds FROM (
            SELECT id, status::text FROM lineshaft.dag
            UNION ALL
            SELECT task.dag_id, CASE
                WHEN ended.status = 'COMPLETED' THEN 'completed'
                WHEN ended.status = 'CANCELLED' THEN 'cancelled'
                WHEN ended.status = 'DEAD_LETTERED' THEN 'failed'
                WHEN live.epoch > 0 THEN 'running'
                ELSE 'pending'
            END
            FROM lineshaft.task
            LEFT JOIN lineshaft.task_live AS live ON live.id = task.id
            LEFT JOIN lineshaft.task_end AS ended ON ended.id = task.id
            WHERE NOT EXISTS (SELECT FROM lineshaft.dag WHERE dag.id = task.dag_id)
        ) AS dag
        JOIN (
            SELECT dag_id, array_agg(substr(kind, 5) ORDER BY seq, n) AS kinds FROM lineshaft.events
            WHERE kind LIKE 'dag.%' AND kind <> 'dag.changed' GROUP BY dag_id
        ) AS story ON story.dag_id = dag.id
        WHERE 1 <> cardinality(array_positions(story.kinds, 'created'))
           OR (dag.status <> 'pending' AND story.kinds[cardinality(story.kinds)] <> dag.status)
           -- Nothing is said twice; but a task may be cancelled, revived and cancelled without a claim.
           OR EXISTS (
            SELECT FROM unnest(story.kinds, story.kinds[2:]) AS said (before, now)
            WHERE said.now = said.before AND said.now <> 'cancelled'
           )
    """,
    "an attempt is open only while its output is validated": """
        SELECT attempt.task_id, attempt.outcome FROM lineshaft.attempt
        LEFT JOIN lineshaft.task_live AS live ON live.id = attempt.task_id AND live.epoch = attempt.epoch
        WHERE (attempt.outcome = 'validating') <> coalesce(live.status = 'VALIDATING', false)
    """,
    "an output is with its agent, or it waits for a gate and holds nothing": """
        SELECT live.id, live.agent_id, attempt.gate FROM lineshaft.task_live AS live
        JOIN lineshaft.attempt ON attempt.task_id = live.id AND attempt.epoch = live.epoch
        WHERE live.status = 'VALIDATING' AND (
            (live.agent_id IS NULL) <> (attempt.gate IS NOT NULL)
            OR (live.agent_id IS NULL AND (live.lease_until IS NOT NULL OR live.reserved_usd <> 0))
        )
    """,
    "a validator may take what waits for one; a person is not hurried": """
        SELECT task_id, gate, gate_due_at FROM lineshaft.attempt
        WHERE outcome = 'validating' AND gate IS NOT NULL AND (gate = 'human') <> (gate_due_at IS NULL)
    """,
    "a breaker's probe is in an agent's hands": """
        SELECT breaker.key, breaker.state, breaker.probe_task_id FROM lineshaft.breaker
        LEFT JOIN lineshaft.task_live AS live ON live.id = breaker.probe_task_id
        WHERE breaker.probe_task_id IS NOT NULL AND (breaker.state <> 'half_open' OR live.agent_id IS NULL)
    """,
    "times in the data of events end in Z": """
        SELECT seq, kinds, data FROM lineshaft.event WHERE data::text LIKE '%+00:00"%'
    """,
    "no task waits for money that is available": """
        SELECT live.id, live.dag_id FROM lineshaft.task_live AS live
        JOIN lineshaft.dag ON dag.id = live.dag_id
        WHERE live.parked = 'dag_budget'
          AND lineshaft.reservation_2(
                lineshaft.attempt_limit_1(live.max_cost_usd, live.max_total_cost_usd, live.cost_usd),
                (SELECT default_max_cost_usd FROM lineshaft.limits)
              )
            <= coalesce(dag.budget_ceiling_usd - dag.spent_usd - dag.reserved_usd, 'infinity')
          -- A task without a limit of its own needs some money.
          AND (
            live.max_cost_usd IS NOT NULL OR live.max_total_cost_usd IS NOT NULL
            OR (dag.spent_usd + dag.reserved_usd < dag.budget_ceiling_usd) IS NOT FALSE
          )
          -- Others that came back first may use it up.
          AND NOT EXISTS (
            SELECT FROM lineshaft.task_live AS other
            WHERE other.dag_id = live.dag_id AND other.status = 'READY' AND other.parked IS NULL
          )
    """,
}


class BrokenInvariantsError(AssertionError):
    """The rules that don't hold, each with the rows that break it. Such a test isn't run again."""


def check_invariants(database: "str | psycopg.Connection") -> None:
    """Check all rules, on a connection or on a new one to this DSN."""
    if isinstance(database, str):
        with psycopg.connect(database, autocommit=True) as connection:
            return check_invariants(connection)
    broken: dict[str, list[Any]] = {}
    # In one round trip: hundreds of tests end with this.
    results = database.execute(";".join(RULES.values()), prepare=False)
    for rule in RULES:
        if rows := results.fetchall():
            broken[rule] = rows
        results.nextset()
    if broken:
        raise BrokenInvariantsError(broken)
    return None
