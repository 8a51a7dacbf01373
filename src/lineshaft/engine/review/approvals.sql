-- Two kinds of approvals: outputs at a gate `human`, and tasks that need the capability `human`.

-- fragment: lanes_for_people
-- Lanes with work for people. Parked tasks wait for a lock or for money.
clock AS MATERIALIZED (SELECT '-infinity'::timestamptz AS now),
generations AS MATERIALIZED (SELECT no FROM lineshaft.generation),
waiting AS (
    -- include: waiting_lanes
),
for_people AS MATERIALIZED (
    SELECT waiting.generation, waiting.lane_id
    FROM waiting
    CROSS JOIN LATERAL (SELECT * FROM lineshaft.lane WHERE lane.id = waiting.lane_id OFFSET 0) AS lane
    WHERE lane.required_capabilities @> '{human}'
)

-- fragment: tasks_for_people
-- Lane by lane, by task_live_claimable; OFFSET 0 keeps the planner from reading all READY tasks.
FROM for_people
CROSS JOIN LATERAL (
    SELECT * FROM lineshaft.task_live
    WHERE task_live.generation = for_people.generation AND task_live.lane_id = for_people.lane_id
      AND task_live.status = 'READY' AND task_live.parked IS NULL
    OFFSET 0
) AS live

-- name: waiting_gates
-- Oldest first, by attempt_to_approve.
SELECT attempt.task_id AS id, 'gate' AS kind, attempt.gate_since AS since, task.gates -> attempt.gate_no::integer -> 'schema' AS schema
FROM lineshaft.attempt
JOIN lineshaft.task ON task.id = attempt.task_id
WHERE attempt.outcome = 'validating' AND attempt.gate = 'human'
  AND (%(since)s::timestamptz IS NULL OR (attempt.gate_since, attempt.task_id) > (%(since)s::timestamptz, %(after)s::text))
ORDER BY attempt.gate_since, attempt.task_id
LIMIT %(limit)s::integer

-- name: waiting_tasks
-- Unclaimed tasks for people. The schema of the answer is that of the first json-schema gate.
WITH RECURSIVE
-- include: lanes_for_people
SELECT live.id, 'task' AS kind, live.ready_at AS since,
    jsonb_path_query_first(task.gates, '$[*] ? (@.method == "json-schema").schema') AS schema
-- include: tasks_for_people
JOIN lineshaft.task ON task.id = live.id
WHERE (%(since)s::timestamptz IS NULL OR (live.ready_at, live.id) > (%(since)s::timestamptz, %(after)s::text))
ORDER BY live.ready_at, live.id
LIMIT %(limit)s::integer

-- name: waiting_one
-- One task, if its output or the task itself waits for a person.
SELECT attempt.task_id AS id, 'gate' AS kind, attempt.gate_since AS since, task.gates -> attempt.gate_no::integer -> 'schema' AS schema
FROM lineshaft.attempt
JOIN lineshaft.task ON task.id = attempt.task_id
WHERE attempt.task_id = %(id)s::text AND attempt.outcome = 'validating' AND attempt.gate = 'human'
UNION ALL
SELECT live.id, 'task', live.ready_at, jsonb_path_query_first(task.gates, '$[*] ? (@.method == "json-schema").schema')
FROM lineshaft.task_live AS live
JOIN lineshaft.task ON task.id = live.id
WHERE live.id = %(id)s::text AND live.status = 'READY' AND task.required_capabilities @> '{human}'

-- name: count_blocked
-- Tasks that wait directly for these, by edge_dependents; up to a limit for each.
SELECT input.id, blocked.count
FROM unnest(%(ids)s::text[]) AS input (id)
CROSS JOIN LATERAL (
    SELECT count(*)::integer AS count
    FROM (SELECT FROM lineshaft.edge WHERE edge.depends_on = input.id AND NOT edge.satisfied LIMIT %(limit)s::integer) AS waiting
) AS blocked

-- name: last_decision
-- The last verdict of a person about a task's output, or the last answer of a person.
SELECT coalesce(verdict.found ->> 'by', substr(attempt.agent_id, 7)) AS reviewer,
    coalesce((verdict.found ->> 'at')::timestamptz, attempt.claimed_at) AS at,
    coalesce((verdict.found ->> 'passed')::boolean, true) AS approved, coalesce(verdict.found -> 'reasons' ->> 0, '') AS note
FROM lineshaft.attempt
LEFT JOIN LATERAL (
    SELECT each.found
    FROM jsonb_array_elements(attempt.verdicts) WITH ORDINALITY AS each (found, no)
    WHERE each.found ->> 'by' IS NOT NULL
    ORDER BY each.no DESC
    LIMIT 1
) AS verdict ON true
WHERE attempt.task_id = %(id)s::text AND (verdict.found IS NOT NULL OR attempt.agent_id LIKE 'human:%%')
ORDER BY attempt.epoch DESC
LIMIT 1

-- name: read_task_for_person
-- With the person's answer as its output.
SELECT task.id, live.epoch + 1 AS epoch, 0::smallint AS gate_no, NULL::text AS gate, task.type, task.title, task.spec, task.gates,
    task.require_decision_report, %(output)s::jsonb AS output
FROM lineshaft.task
JOIN lineshaft.task_live AS live ON live.id = task.id
WHERE task.id = %(id)s::text AND live.status = 'READY' AND task.required_capabilities @> '{human}'

-- name: answer_task
-- READY → VALIDATING: the work is done, so there is no claim. Guarded by the lock that lock_tasks holds.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, now()) AS now),
taken AS (
    UPDATE lineshaft.task_live AS live
    SET status = 'VALIDATING', epoch = live.epoch + 1, claimed_at = clock.now, started_at = clock.now,
        first_started_at = coalesce(live.first_started_at, clock.now), parked = NULL, parked_key = NULL
    FROM clock
    WHERE live.id = %(id)s::text AND live.epoch = %(epoch)s::integer AND live.status = 'READY'
    RETURNING live.id, live.epoch, live.attempts, live.revivals
)
INSERT INTO lineshaft.attempt (task_id, epoch, number, revival, agent_id, claimed_at, started_at, outcome, output)
SELECT taken.id, taken.epoch, taken.attempts + 1, taken.revivals, %(by)s::text, clock.now, clock.now, 'validating', %(output)s::jsonb
FROM taken CROSS JOIN clock
RETURNING task_id

-- name: start_dag
WITH started AS (UPDATE lineshaft.dag SET status = 'running', ended_at = NULL WHERE id = %(id)s::text AND status <> 'running' RETURNING id)
INSERT INTO lineshaft.event (at, kinds, dag_id) SELECT coalesce(%(now)s::timestamptz, now()), '{dag.running}', started.id FROM started

-- name: try_announce
-- One node at a time.
SELECT pg_try_advisory_xact_lock(hashtextextended('lineshaft.announce', 0)) AS got

-- name: announce_waiting
-- One event for each time that a task waits for a person. (An output at a gate has an event when it gets there.) Events since the task
-- first became READY are in few partitions.
WITH RECURSIVE
-- include: lanes_for_people
INSERT INTO lineshaft.event (at, kinds, task_id, dag_id, epoch, data)
SELECT coalesce(%(now)s::timestamptz, now()), '{approval.waiting}', live.id, live.dag_id, live.epoch, '{"kind": "task"}'
-- include: tasks_for_people
WHERE NOT EXISTS (
    SELECT FROM lineshaft.event
    WHERE event.task_id = live.id AND event.at >= live.ready_at AND event.epoch = live.epoch AND event.kinds @> '{approval.waiting}'
    OFFSET 0
  )
ORDER BY live.submission_no
LIMIT %(limit)s::integer
RETURNING task_id
