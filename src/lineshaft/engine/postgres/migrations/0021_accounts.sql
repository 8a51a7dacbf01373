-- Accounts with providers: a claim chooses one that is open. Processes of the previous version choose none.

CREATE TABLE lineshaft.account (
    used_at timestamptz,
    name text COLLATE "C" NOT NULL,
    CONSTRAINT account_pkey PRIMARY KEY (name)
);
COMMENT ON TABLE lineshaft.account IS 'Accounts with providers that instances have offered.';
COMMENT ON COLUMN lineshaft.account.used_at IS 'When a claim last chose it; null: never.';
COMMENT ON COLUMN lineshaft.account.name IS 'Its name.';

-- A table of its own, not columns of agent: it is written after slowdowns, which come after agents in the order of locks.
CREATE TABLE lineshaft.account_outage (
    since timestamptz NOT NULL,
    until timestamptz,
    agent_id text COLLATE "C" NOT NULL,
    CONSTRAINT account_outage_pkey PRIMARY KEY (agent_id)
);
COMMENT ON TABLE lineshaft.account_outage IS 'Agents of which it was reported that all their accounts are closed.';
COMMENT ON COLUMN lineshaft.account_outage.since IS 'When it was reported.';
COMMENT ON COLUMN lineshaft.account_outage.until IS 'When the first of them opens; null: not known.';
COMMENT ON COLUMN lineshaft.account_outage.agent_id IS 'The agent.';

ALTER TABLE lineshaft.task_live
    ADD COLUMN last_account text,
    ADD COLUMN long_waits smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN lineshaft.task_live.last_account IS 'The account of its last attempt.';
COMMENT ON COLUMN lineshaft.task_live.long_waits IS 'Rate limits in a row that were not counted: the provider said when it goes on.';
-- How many tasks each account works on.
CREATE INDEX task_live_account ON lineshaft.task_live (account) WHERE account IS NOT NULL;

ALTER TABLE lineshaft.task_end ADD COLUMN account text;
COMMENT ON COLUMN lineshaft.task_end.account IS 'The account that its last claim used.';

ALTER TABLE lineshaft.attempt ADD COLUMN account text;
COMMENT ON COLUMN lineshaft.attempt.account IS 'The account that it used.';

ALTER TABLE lineshaft.dag ADD COLUMN account text;
COMMENT ON COLUMN lineshaft.dag.account IS 'The account that its tasks used last.';

-- Those of these accounts that can be used: not slowed down, and without a breaker that isn't closed, except those in `p_probing`. Volatile: it
-- sees what others have committed by the time of the call, while the statement that calls it may have waited for locks.
CREATE FUNCTION lineshaft.open_accounts_1(p_accounts text[], p_probing text[], p_now timestamptz) RETURNS text[] LANGUAGE sql VOLATILE AS $$
    SELECT ARRAY(
        SELECT offered.name
        FROM unnest(p_accounts) WITH ORDINALITY AS offered (name, place)
        WHERE NOT EXISTS (SELECT FROM lineshaft.slowdown WHERE slowdown.key = 'account:' || offered.name AND slowdown.until > p_now)
          AND NOT EXISTS (
            SELECT FROM lineshaft.breaker
            WHERE breaker.key = 'account:' || offered.name AND breaker.state <> 'closed' AND (breaker.key = ANY (p_probing)) IS NOT TRUE
          )
          AND NOT EXISTS (
            SELECT FROM lineshaft.limits
            WHERE limits.quota_kinds & 4 <> 0 AND lineshaft.room_for_1(ARRAY['account:' || offered.name], p_now) <= 0
          )
        ORDER BY offered.place
    )
$$;
COMMENT ON FUNCTION lineshaft.open_accounts_1(text[], text[], timestamptz) IS 'The accounts that claims can use now.';

-- The earliest end of the slowdowns of these accounts. NULL: none is slowed down.
CREATE FUNCTION lineshaft.accounts_until_1(p_accounts text[], p_now timestamptz) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT min(slowdown.until)
    FROM unnest(p_accounts) AS offered (name)
    JOIN lineshaft.slowdown ON slowdown.key = 'account:' || offered.name AND slowdown.until > p_now
$$;
COMMENT ON FUNCTION lineshaft.accounts_until_1(text[], timestamptz) IS 'When the first of the accounts that are slowed down opens.';

-- The account of each of these tasks, by id: that of its last attempt, which `p_last` has, if it is open; else the one that its DAG used last; else
-- those with the fewest running tasks in turn, the one that was chosen longest ago first. Tasks of one DAG get the same. NULL: none is open.
CREATE FUNCTION lineshaft.chosen_accounts_1(p_open text[], p_ids text[], p_last text[], p_dag_ids text[]) RETURNS jsonb LANGUAGE sql VOLATILE AS $$
    WITH idle AS MATERIALIZED (
        SELECT array_agg(
            choice.name
            ORDER BY (SELECT count(*) FROM lineshaft.task_live AS live WHERE live.account = choice.name AND live.agent_id IS NOT NULL),
                account.used_at NULLS FIRST, choice.place
        ) AS names
        FROM unnest(p_open) WITH ORDINALITY AS choice (name, place)
        LEFT JOIN lineshaft.account ON account.name = choice.name
    )
    SELECT jsonb_object_agg(
        asked.id,
        CASE
            WHEN asked.last = ANY (p_open) THEN asked.last
            WHEN asked.of_dag = ANY (p_open) THEN asked.of_dag
            ELSE idle.names[1 + (asked.turn - 1) % cardinality(idle.names)]
        END
    )
    FROM (
        SELECT task.id, task.last, task.of_dag,
            dense_rank() OVER (
                PARTITION BY (task.last = ANY (p_open) OR task.of_dag = ANY (p_open)) IS TRUE ORDER BY task.first_place
            ) AS turn
        FROM (
            SELECT input.id, input.last, dag.account AS of_dag,
                min(input.place) OVER (PARTITION BY coalesce(input.dag_id, input.id)) AS first_place
            FROM unnest(p_ids, p_last, p_dag_ids) WITH ORDINALITY AS input (id, last, dag_id, place)
            LEFT JOIN lineshaft.dag ON dag.id = input.dag_id
        ) AS task
    ) AS asked
    CROSS JOIN idle
    WHERE cardinality(p_open) > 0
$$;
COMMENT ON FUNCTION lineshaft.chosen_accounts_1(text[], text[], text[], text[]) IS 'The accounts that claims of these tasks use.';
