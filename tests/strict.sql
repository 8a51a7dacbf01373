-- Everything that must be true of a row, as constraints of the tests' databases: whatever a test does, a statement that breaks one of
-- these fails. In production each would cost every statement that writes; the schema itself has the few that would lose work.

ALTER TABLE lineshaft.task ADD CONSTRAINT strict_task CHECK (
    type <> '' AND priority BETWEEN 0 AND 100 AND priority_boost_per_minute >= 0 AND max_attempts > 0
    AND max_duration_sec > 0 AND heartbeat_interval_sec > 0 IS NOT FALSE
    AND max_cost_usd >= 0 IS NOT FALSE AND max_total_cost_usd >= 0 IS NOT FALSE
);

ALTER TABLE lineshaft.task_live ADD CONSTRAINT strict_status CHECK (
    CASE
        WHEN status IN ('CLAIMED', 'RUNNING', 'VALIDATING') THEN
            -- The agent may run a gate itself; one that runs elsewhere holds nothing.
            (agent_id IS NULL) = (lease_until IS NULL) AND (agent_id IS NULL) = (incarnation IS NULL) AND (agent_id IS NOT NULL OR status = 'VALIDATING')
            AND claimed_at IS NOT NULL AND (started_at IS NOT NULL OR status = 'CLAIMED')
            AND epoch > 0 AND reserved_usd >= 0 AND parked IS NULL AND (agent_id IS NOT NULL OR NOT has_slots)
        WHEN has_slots OR agent_id IS NOT NULL OR incarnation IS NOT NULL OR lock_token IS NOT NULL OR lease_until IS NOT NULL OR reserved_usd <> 0 THEN false
        WHEN status = 'READY' THEN
            blocked = 0 AND ready_at IS NOT NULL AND (parked IS NULL OR parked = 'lock' OR parked = 'dag_budget' OR parked = 'quota' OR parked = 'fair')
        -- With a fair_key it becomes READY parked.
        WHEN status = 'PENDING' THEN
            (blocked > 0 OR (blocked = 0 AND due_at IS NOT NULL)) AND parked IS NOT DISTINCT FROM CASE WHEN admission ? 'fair' THEN 'fair' END
        WHEN status = 'RETRYING' THEN due_at IS NOT NULL AND parked IS NOT DISTINCT FROM CASE WHEN admission ? 'fair' THEN 'fair' END
        ELSE false
    END
);

ALTER TABLE lineshaft.task_live ADD CONSTRAINT strict_parked CHECK (
    CASE parked
        WHEN 'quota' THEN parked_key IS NOT NULL
        WHEN 'fair' THEN admission ? 'fair' AND (parked_key IS NULL OR (status = 'READY' AND parked_key = admission ->> 'fair'))
        ELSE parked_key IS NULL
    END
);

ALTER TABLE lineshaft.task_end ADD CONSTRAINT strict_end CHECK (
    CASE status
        WHEN 'COMPLETED' THEN true
        WHEN 'CANCELLED' THEN output IS NULL AND artifacts IS NULL AND decision_report IS NULL
        WHEN 'DEAD_LETTERED' THEN reason IS NOT NULL AND category IS NOT NULL
            AND output IS NULL AND artifacts IS NULL AND decision_report IS NULL
        ELSE false
    END
);

-- What a running attempt has spent within its reservation may be corrected before it is booked: then spent_usd is negative for a while.
ALTER TABLE lineshaft.dag
    ADD CONSTRAINT strict_counters CHECK (
        completed >= 0 AND cancelled >= 0 AND dead_lettered >= 0
        AND completed + cancelled + dead_lettered <= total
        AND reserved_usd >= 0 AND spent_usd + reserved_usd >= 0 AND budget_ceiling_usd >= 0 IS NOT FALSE
    ),
    ADD CONSTRAINT strict_end CHECK ((ended_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled')));

ALTER TABLE lineshaft.agent ADD CONSTRAINT strict_agent CHECK (
    spent_usd + reserved_usd >= 0 AND reserved_usd >= 0 AND budget_usd >= 0 IS NOT FALSE AND set_max_tasks > 0 IS NOT FALSE
);

ALTER TABLE lineshaft.instance ADD CONSTRAINT strict_instance CHECK (
    max_concurrent_tasks > 0 AND held >= 0 AND set_max_tasks > 0 IS NOT FALSE
);
