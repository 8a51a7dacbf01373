-- A database as a fleet leaves it after a month, for `large_database.py`. {ended} and {live} are numbers; every statement runs alone.

-- Lanes, agents and their processes: one in twenty is silent.
INSERT INTO lineshaft.lane (type, required_capabilities, models, boost_per_minute, cost_from_usd)
SELECT 'type-' || n, CASE WHEN n = 20 THEN '{human}'::text[] ELSE '{}' END, '{}', 0.1, NULL FROM generate_series(1, 20) AS n;

INSERT INTO lineshaft.agent (id, registered_at, incarnation, spent_usd, budget_usd)
SELECT 'agent-' || n, now() - interval '1 day', 5, n, CASE WHEN n % 3 = 0 THEN n + 1000 END FROM generate_series(1, 200) AS n;

INSERT INTO lineshaft.instance (agent_id, incarnation, name, host, registered_at, last_heartbeat, max_concurrent_tasks, held, busy_since, types)
SELECT 'agent-' || agent, n, 'process-' || n, 'host-' || agent % 20, now() - interval '1 day',
    now() - CASE WHEN agent % 20 = 0 THEN interval '1 hour' ELSE interval '0' END, 20, 0, NULL,
    ARRAY(SELECT 'type-' || t FROM generate_series(1, 18) AS t)
FROM generate_series(1, 200) AS agent CROSS JOIN generate_series(1, 5) AS n;

-- History: tasks that ended within thirty days, one block of ten in five is a DAG. Two per cent are dead letters, three were cancelled.
CREATE TEMPORARY TABLE past AS
SELECT
    n, n / 10 AS block, '01' || upper(lpad(to_hex(n), 24, '0')) AS name, now() - interval '30 days' * (({ended} - n)::double precision / {ended}) AS ended_at,
    CASE WHEN n % 50 = 7 THEN 'DEAD_LETTERED' WHEN n % 33 = 5 THEN 'CANCELLED' ELSE 'COMPLETED' END AS status,
    'type-' || 1 + n % 18 AS type, 'agent-' || 1 + n % 200 AS agent_id, CASE n % 4 WHEN 0 THEN 'openai/large' WHEN 1 THEN 'openai/small' WHEN 2 THEN 'local/one' END AS model,
    (1 + n % 97) / 1000.0 AS cost_usd
FROM generate_series(1, {ended}) AS n;

INSERT INTO lineshaft.task (id, dag_id, type, title, created_at, spec, tags)
SELECT 'task_' || name, CASE WHEN block % 5 = 0 THEN 'dag_01' || upper(lpad(to_hex(block), 24, '0')) ELSE 'dag_' || name END, type,
    'Task ' || n || ' of a long history', ended_at - interval '10 minutes', jsonb_build_object('number', n), CASE WHEN n % 10 = 0 THEN '{nightly}'::text[] ELSE '{}' END
FROM past;

INSERT INTO lineshaft.task_end (
    id, status, ended_at, ready_at, claimed_at, started_at, first_started_at, epoch, agent_id, incarnation, model, cost_usd, tokens_input,
    tokens_output, reason, category, output
)
SELECT 'task_' || name, status::lineshaft.task_status, ended_at, ended_at - interval '10 minutes', ended_at - interval '5 minutes',
    ended_at - interval '5 minutes', ended_at - interval '5 minutes', 1, agent_id, 1, model, cost_usd, 1000, 200,
    CASE status WHEN 'CANCELLED' THEN 'no longer needed' WHEN 'DEAD_LETTERED' THEN 'no access to bucket ' || n % 40 END,
    CASE status WHEN 'DEAD_LETTERED' THEN 'auth_failure' END, CASE status WHEN 'COMPLETED' THEN '{"ok": true}'::jsonb END
FROM past;

INSERT INTO lineshaft.dag (id, title, created_at, ended_at, status, total, completed, cancelled, dead_lettered, spent_usd)
SELECT 'dag_01' || upper(lpad(to_hex(block), 24, '0')), 'DAG ' || block, min(ended_at) - interval '10 minutes', max(ended_at),
    CASE WHEN bool_or(status = 'DEAD_LETTERED') THEN 'failed' ELSE 'completed' END::lineshaft.dag_status, count(*),
    count(*) FILTER (WHERE status = 'COMPLETED'), count(*) FILTER (WHERE status = 'CANCELLED'), count(*) FILTER (WHERE status = 'DEAD_LETTERED'),
    sum(cost_usd)
FROM past WHERE block % 5 = 0 GROUP BY block;

INSERT INTO lineshaft.attempt (
    task_id, epoch, number, claimed_at, started_at, ended_at, agent_id, incarnation, model, outcome, category, error, cost_usd
)
SELECT 'task_' || name, 1, 1, ended_at - interval '5 minutes', ended_at - interval '5 minutes', ended_at, agent_id, 1, model, 'failed',
    'auth_failure', 'no access to bucket ' || n % 40, cost_usd
FROM past WHERE status = 'DEAD_LETTERED';

-- A quarter of the dead letters has no decision.
INSERT INTO lineshaft.dead_letter (
    task_id, epoch, dead_lettered_at, total_cost_usd, category, error, pattern, reviewed, resolution, reviewed_at, reviewer
)
SELECT 'task_' || name, 1, ended_at, cost_usd, 'auth_failure', 'no access to bucket ' || n % 40, 'no access to bucket ' || n % 40, n % 4 <> 3,
    CASE WHEN n % 4 <> 3 THEN 'delete' END, CASE WHEN n % 4 <> 3 THEN ended_at + interval '1 hour' END, CASE WHEN n % 4 <> 3 THEN 'ann' END
FROM past WHERE status = 'DEAD_LETTERED';

-- Live tasks, in blocks of ten: chains in DAGs, running, delayed, parked, and READY ones.
CREATE TEMPORARY TABLE present AS
SELECT
    n, block, place, '02' || upper(lpad(to_hex(n), 24, '0')) AS name, 'type-' || 1 + n % 20 AS type,
    CASE
        WHEN block % 100 = 50 AND place = 0 THEN 'DEAD_LETTERED'
        WHEN block % 10 < 3 THEN CASE WHEN place = 0 THEN 'READY' ELSE 'PENDING' END
        WHEN block % 10 = 3 THEN 'RUNNING'
        WHEN block % 10 = 4 THEN 'RETRYING'
        WHEN block % 10 = 5 THEN 'PENDING'
        WHEN block % 100 = 99 THEN 'VALIDATING'
        ELSE 'READY'
    END AS status,
    block % 10 < 3 OR (block % 10 = 6 AND place >= 5) AS in_dag, block % 10 < 3 AND place > 0 AS is_blocked,
    CASE WHEN block % 10 = 6 THEN CASE WHEN place < 5 THEN 'lock' ELSE 'dag_budget' END END AS parked,
    now() - interval '2 hours' * (({live} - n)::double precision / {live}) AS created_at, 1 + n % 190 AS agent, 1 + n / 190 % 5 AS incarnation
FROM (SELECT n, n / 10 AS block, n % 10 AS place FROM generate_series(0, {live} - 1) AS n) AS numbers;

INSERT INTO lineshaft.task (id, dag_id, type, title, created_at, spec, required_capabilities, gates, lock_key)
SELECT 'task_' || name, CASE WHEN in_dag THEN 'dag_02' || upper(lpad(to_hex(block), 24, '0')) ELSE 'dag_' || name END, type,
    'Live task ' || n, created_at, jsonb_build_object('number', n), CASE WHEN type = 'type-20' THEN '{human}'::text[] ELSE '{}' END,
    CASE WHEN status = 'VALIDATING' THEN '[{"method": "human"}]'::jsonb END, CASE WHEN parked = 'lock' THEN 'doc-' || block END
FROM present;

INSERT INTO lineshaft.dag (id, title, created_at, status, total, dead_lettered, budget_ceiling_usd, spent_usd)
SELECT 'dag_02' || upper(lpad(to_hex(block), 24, '0')), 'Live DAG ' || block, min(created_at), 'running', count(*),
    count(*) FILTER (WHERE status = 'DEAD_LETTERED'), CASE WHEN bool_or(parked = 'dag_budget') THEN 1 END, CASE WHEN bool_or(parked = 'dag_budget') THEN 1 ELSE 0 END
FROM present WHERE in_dag GROUP BY block;

INSERT INTO lineshaft.edge (task_id, depends_on)
SELECT 'task_' || present.name, 'task_02' || upper(lpad(to_hex(n - 1), 24, '0')) FROM present WHERE is_blocked;

INSERT INTO lineshaft.task_end (id, status, ended_at, epoch, reason, category)
SELECT 'task_' || name, 'DEAD_LETTERED', created_at, 1, 'no access', 'auth_failure' FROM present WHERE status = 'DEAD_LETTERED';

INSERT INTO lineshaft.dead_letter (task_id, epoch, dead_lettered_at, total_cost_usd, category, error, pattern)
SELECT 'task_' || name, 1, created_at, 0, 'auth_failure', 'no access', 'no access' FROM present WHERE status = 'DEAD_LETTERED';

INSERT INTO lineshaft.task_live (
    id, status, lane_id, rank, ready_at, generation, epoch, dag_id, blocked, due_at, parked, lock_key, agent_id, incarnation, claimed_at,
    started_at, first_started_at, heartbeat_at, lease_until, heartbeat_sec, is_gated, last_category, attempts
)
SELECT 'task_' || name, status::lineshaft.task_status, lane.id, 50 + 0.1 * lineshaft.minutes(created_at), CASE WHEN status <> 'PENDING' THEN created_at END,
    CASE WHEN status = 'READY' THEN 1 ELSE 0 END, CASE WHEN status IN ('RUNNING', 'VALIDATING', 'RETRYING') THEN 1 ELSE 0 END,
    CASE WHEN in_dag THEN 'dag_02' || upper(lpad(to_hex(block), 24, '0')) END, CASE WHEN is_blocked THEN 1 ELSE 0 END,
    CASE WHEN status = 'RETRYING' OR (status = 'PENDING' AND NOT is_blocked) THEN now() + interval '1 second' * (60 + n % 3600) END,
    parked, CASE WHEN parked = 'lock' THEN 'doc-' || block END,
    CASE WHEN status = 'RUNNING' THEN 'agent-' || agent END, CASE WHEN status = 'RUNNING' THEN incarnation END,
    CASE WHEN status IN ('RUNNING', 'VALIDATING') THEN now() END, CASE WHEN status IN ('RUNNING', 'VALIDATING') THEN now() END,
    CASE WHEN status IN ('RUNNING', 'VALIDATING') THEN now() END, CASE WHEN status = 'RUNNING' THEN now() END,
    CASE WHEN status = 'RUNNING' THEN now() + interval '1 hour' END, CASE WHEN status = 'RUNNING' THEN 1200 END, status = 'VALIDATING',
    CASE WHEN status = 'RETRYING' THEN 'transient' END, CASE WHEN status = 'RETRYING' THEN 1 ELSE 0 END
FROM present JOIN lineshaft.lane ON lane.type = present.type
WHERE status <> 'DEAD_LETTERED';

UPDATE lineshaft.instance SET held = holding.n, max_concurrent_tasks = greatest(20, holding.n), busy_since = now()
FROM (SELECT agent_id, incarnation, count(*) AS n FROM lineshaft.task_live WHERE agent_id IS NOT NULL GROUP BY agent_id, incarnation) AS holding
WHERE instance.agent_id = holding.agent_id AND instance.incarnation = holding.incarnation;

INSERT INTO lineshaft.lock (key, holder_task_id, acquired_at, expires_at)
SELECT DISTINCT ON (block) 'doc-' || block, 'task_02' || upper(lpad(to_hex((block - 3) * 10), 24, '0')), now(), now() + interval '1 hour'
FROM present WHERE parked = 'lock';

INSERT INTO lineshaft.attempt (task_id, epoch, number, claimed_at, started_at, outcome, output, gate, gate_since)
SELECT 'task_' || name, 1, 1, created_at, created_at, 'validating', '{"data": "draft"}', 'human', created_at FROM present WHERE status = 'VALIDATING';

INSERT INTO lineshaft.attempt (task_id, epoch, number, claimed_at, started_at, ended_at, agent_id, outcome, category, error)
SELECT 'task_' || name, 1, 1, created_at, created_at, created_at, 'agent-' || agent, 'failed', 'transient', 'the connection was reset'
FROM present WHERE status = 'RETRYING';

-- Costs of 400 days, with as many groups as a day may have; today's events are counted when figures are read.
INSERT INTO lineshaft.cost_day (day, type, agent_id, model, attempts, failed, cost_usd, failed_cost_usd)
SELECT (now() AT TIME ZONE 'UTC')::date - day, 'type-' || 1 + n % 20, 'agent-' || n, CASE n % 3 WHEN 0 THEN '' ELSE 'openai/' || n % 3 END, 60, 2, 3, 0.1
FROM generate_series(1, 399) AS day CROSS JOIN generate_series(1, 500) AS n;

INSERT INTO lineshaft.spend (day, spent_usd) SELECT day, sum(cost_usd) FROM lineshaft.cost_day GROUP BY day;

INSERT INTO lineshaft.minute (at, completed, failed, cost_usd, priced)
SELECT date_trunc('minute', now()) - n * interval '1 minute', 100, 3, 2, 100 FROM generate_series(2, 2879) AS n;

INSERT INTO lineshaft.breaker (key, state, failures, opened_at, last_failure) VALUES ('type-3', 'open', 7, now(), now());

INSERT INTO lineshaft.pause (type, since) VALUES ('type-4', now());

INSERT INTO lineshaft.slowdown (key, until, signalled_at, reason) VALUES ('model:openai/large', now() + interval '1 hour', now(), '429');
