-- Reports of cost beyond a ceiling, which a person accepts or refuses, and corrections by hand.

-- The most that the reports of one claim count for; the rest is disputed.
CREATE FUNCTION lineshaft.cost_ceiling_1(max_cost_usd numeric, default_max_cost_usd numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 10 * greatest(max_cost_usd, default_max_cost_usd, 1);

-- Claims that reported more than their ceiling.
CREATE TABLE lineshaft.cost_dispute (
    at timestamptz NOT NULL,
    epoch integer NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C" NOT NULL,
    reported_usd numeric(20, 6) NOT NULL,
    -- Of the first such report. It stays, whatever becomes of the limits: the rows of the claim have counted this much.
    ceiling_usd numeric(20, 6) NOT NULL,
    decided_usd numeric(20, 6) NOT NULL DEFAULT 0,
    CONSTRAINT cost_dispute_pkey PRIMARY KEY (task_id, epoch),
    CONSTRAINT possible_dispute CHECK (reported_usd > ceiling_usd AND decided_usd BETWEEN 0 AND reported_usd - ceiling_usd)
);
COMMENT ON TABLE lineshaft.cost_dispute IS 'Claims that reported more than their ceiling: what is above it counts only if a person accepts it.';
COMMENT ON COLUMN lineshaft.cost_dispute.at IS 'The first report above the ceiling.';
COMMENT ON COLUMN lineshaft.cost_dispute.epoch IS 'The number of the claim.';
COMMENT ON COLUMN lineshaft.cost_dispute.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.cost_dispute.agent_id IS 'The agent that made the claim.';
COMMENT ON COLUMN lineshaft.cost_dispute.reported_usd IS 'The most that the claim has reported.';
COMMENT ON COLUMN lineshaft.cost_dispute.ceiling_usd IS 'What of it counts without a decision.';
COMMENT ON COLUMN lineshaft.cost_dispute.decided_usd IS 'What of the rest people have accepted or refused.';
-- Those that wait for a person.
CREATE INDEX cost_dispute_open ON lineshaft.cost_dispute (at) WHERE reported_usd - ceiling_usd > decided_usd;

-- The cost of a task is what its claims reported, with gates, and these. A correction is booked on the ledgers of the claims that it
-- concerns, so it may have several rows.
CREATE TABLE lineshaft.cost_correction (
    no bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL,
    epoch integer NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    amount_usd numeric(20, 6) NOT NULL,
    actor text,
    reason text NOT NULL,
    CONSTRAINT cost_correction_pkey PRIMARY KEY (no)
);
COMMENT ON TABLE lineshaft.cost_correction IS 'Corrections of costs by hand, beside what claims have reported.';
COMMENT ON COLUMN lineshaft.cost_correction.no IS 'Its number.';
COMMENT ON COLUMN lineshaft.cost_correction.at IS 'When it was booked.';
COMMENT ON COLUMN lineshaft.cost_correction.epoch IS 'The claim that it concerns; 0: none.';
COMMENT ON COLUMN lineshaft.cost_correction.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.cost_correction.agent_id IS 'The agent that made the claim; NULL: none.';
COMMENT ON COLUMN lineshaft.cost_correction.amount_usd IS 'What was added to the cost; negative: taken away.';
COMMENT ON COLUMN lineshaft.cost_correction.actor IS 'Who corrected it; NULL: unknown.';
COMMENT ON COLUMN lineshaft.cost_correction.reason IS 'Why.';
CREATE INDEX cost_correction_of_task ON lineshaft.cost_correction (task_id);

-- What people have added to the cost of a task. Without it, the cost is what its claims reported, with gates.
CREATE FUNCTION lineshaft.corrected_1(task_id text) RETURNS numeric
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (SELECT coalesce(sum(amount_usd), 0) FROM lineshaft.cost_correction WHERE cost_correction.task_id = corrected_1.task_id);

-- As before, but without corrections: an attempt costs what it reported.
CREATE OR REPLACE VIEW lineshaft.attempts AS
SELECT
    task_id, epoch, number::integer AS number, revival::integer AS revival, outcome, agent_id, model, version, category, error,
    traceback, claimed_at, started_at, ended_at, cost_usd, tokens_input, tokens_output
FROM lineshaft.attempt
-- A completed attempt is recorded here too if its output was validated.
WHERE outcome <> 'completed'
UNION ALL
SELECT
    id, epoch, attempts + 1, revivals, 'running', agent_id, model, version, NULL, NULL, NULL, claimed_at, started_at, NULL, attempt_cost_usd,
    attempt_tokens_input, attempt_tokens_output
FROM lineshaft.task_live
WHERE lease_until IS NOT NULL AND status IN ('CLAIMED', 'RUNNING')
UNION ALL
SELECT
    ended.id, ended.epoch, ended.attempts + 1, ended.revivals, 'completed', ended.agent_id, ended.model, ended.version, NULL, NULL, NULL,
    ended.claimed_at, ended.started_at, ended.ended_at, (ended.cost_usd - lineshaft.corrected_1(ended.id) - earlier.cost_usd)::numeric(20, 6),
    (ended.tokens_input - earlier.tokens_input)::bigint, (ended.tokens_output - earlier.tokens_output)::bigint
FROM lineshaft.task_end AS ended
CROSS JOIN LATERAL (
    SELECT coalesce(sum(cost_usd), 0) AS cost_usd, coalesce(sum(tokens_input), 0) AS tokens_input,
        coalesce(sum(tokens_output), 0) AS tokens_output
    FROM lineshaft.attempt WHERE attempt.task_id = ended.id AND attempt.epoch < ended.epoch
) AS earlier
WHERE ended.status = 'COMPLETED' AND ended.claimed_at IS NOT NULL;
