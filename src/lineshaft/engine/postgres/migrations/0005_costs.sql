-- Figures by time, kept by the tally (read/tally.sql): reading them never scans the history.

CREATE TABLE lineshaft.cost_day (
    day date NOT NULL,
    attempts bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    retries bigint NOT NULL DEFAULT 0,
    unpriced bigint NOT NULL DEFAULT 0,
    tokens_input bigint NOT NULL DEFAULT 0,
    tokens_output bigint NOT NULL DEFAULT 0,
    cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    failed_cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    retry_cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    -- All three are * where a day has too many groups.
    type text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C" NOT NULL,
    model text COLLATE "C" NOT NULL,
    CONSTRAINT cost_day_pkey PRIMARY KEY (day, type, agent_id, model)
) WITH (fillfactor = 70);
COMMENT ON TABLE lineshaft.cost_day IS 'Attempts that ended on each day (UTC), with their cost, by type, agent and model.';
COMMENT ON COLUMN lineshaft.cost_day.day IS 'The day on which the attempts ended, in UTC.';
COMMENT ON COLUMN lineshaft.cost_day.attempts IS 'Attempts that ended, in whatever way.';
COMMENT ON COLUMN lineshaft.cost_day.failed IS 'Those that failed.';
COMMENT ON COLUMN lineshaft.cost_day.retries IS 'Those that followed a failed attempt of the same task.';
COMMENT ON COLUMN lineshaft.cost_day.unpriced IS 'Those that used tokens and reported no cost.';
COMMENT ON COLUMN lineshaft.cost_day.tokens_input IS 'Input tokens.';
COMMENT ON COLUMN lineshaft.cost_day.tokens_output IS 'Output tokens.';
COMMENT ON COLUMN lineshaft.cost_day.cost_usd IS 'What all of them cost.';
COMMENT ON COLUMN lineshaft.cost_day.failed_cost_usd IS 'What the failed ones cost.';
COMMENT ON COLUMN lineshaft.cost_day.retry_cost_usd IS 'What the retries cost.';
COMMENT ON COLUMN lineshaft.cost_day.type IS 'The task type; *: the groups that the day had no room for.';
COMMENT ON COLUMN lineshaft.cost_day.agent_id IS 'The agent; empty: none is known.';
COMMENT ON COLUMN lineshaft.cost_day.model IS 'The model that the claim was given; empty: none.';

CREATE TABLE lineshaft.minute (
    at timestamptz NOT NULL,
    completed integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    dead_lettered integer NOT NULL DEFAULT 0,
    cancelled integer NOT NULL DEFAULT 0,
    priced integer NOT NULL DEFAULT 0,
    cost_usd numeric(20, 6) NOT NULL DEFAULT 0,
    CONSTRAINT minute_pkey PRIMARY KEY (at)
) WITH (fillfactor = 70);
COMMENT ON TABLE lineshaft.minute IS 'What happened in each minute of the last two days.';
COMMENT ON COLUMN lineshaft.minute.at IS 'The beginning of the minute.';
COMMENT ON COLUMN lineshaft.minute.completed IS 'Tasks that completed.';
COMMENT ON COLUMN lineshaft.minute.failed IS 'Attempts that failed.';
COMMENT ON COLUMN lineshaft.minute.dead_lettered IS 'Tasks that failed permanently.';
COMMENT ON COLUMN lineshaft.minute.cancelled IS 'Tasks that were cancelled.';
COMMENT ON COLUMN lineshaft.minute.priced IS 'Attempts that ended and had a cost.';
COMMENT ON COLUMN lineshaft.minute.cost_usd IS 'What they cost.';
