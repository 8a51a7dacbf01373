-- Gates that cost money reserve it before they run, as attempts do.

ALTER TABLE lineshaft.attempt ADD COLUMN gate_blocked_by text COLLATE "C";
COMMENT ON COLUMN lineshaft.attempt.gate_blocked_by IS 'The limit that has no money left for its gate, when a validator last looked; NULL: none.';

-- A run is a row from its reservation until its cost is booked, whatever becomes of its task: a task that is cancelled leaves the money that its
-- judge is spending reserved. A run whose validator dies is taken to have cost what was reserved for it.
CREATE TABLE lineshaft.gate_run (
    -- The lease of its validator.
    until timestamptz NOT NULL,
    epoch integer NOT NULL,
    -- As gate_runs of the attempt: the validator that was given this run settles it, and no other.
    run integer NOT NULL,
    gate_no smallint NOT NULL,
    -- The reservation is part of the agent's reserved money, and of the day's; it is always part of the DAG's.
    agent_reserved boolean NOT NULL,
    day_reserved boolean NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    agent_id text COLLATE "C",
    reserved_usd numeric(20, 6) NOT NULL,
    CONSTRAINT gate_run_pkey PRIMARY KEY (task_id, epoch)
) WITH (fillfactor = 50);
COMMENT ON TABLE lineshaft.gate_run IS 'Runs of gates that cost money, with what is reserved for them.';
COMMENT ON COLUMN lineshaft.gate_run.until IS 'When the lease of its validator ends.';
COMMENT ON COLUMN lineshaft.gate_run.epoch IS 'The claim whose output is checked.';
COMMENT ON COLUMN lineshaft.gate_run.run IS 'The number of the run.';
COMMENT ON COLUMN lineshaft.gate_run.gate_no IS 'The number of the gate.';
COMMENT ON COLUMN lineshaft.gate_run.agent_reserved IS 'Its reservation is part of the agent''s.';
COMMENT ON COLUMN lineshaft.gate_run.day_reserved IS 'Its reservation is part of the day''s.';
COMMENT ON COLUMN lineshaft.gate_run.task_id IS 'The task.';
COMMENT ON COLUMN lineshaft.gate_run.agent_id IS 'The agent that made the output, which pays.';
COMMENT ON COLUMN lineshaft.gate_run.reserved_usd IS 'Money reserved for it.';
CREATE INDEX gate_run_lost ON lineshaft.gate_run (until);
