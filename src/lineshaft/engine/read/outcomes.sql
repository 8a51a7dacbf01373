-- name: outcomes
-- Of the newest `most` dead letters, of the first `most` live tasks, and of the last `ends` tasks that ended: see outcomes.py.
SELECT
    (
        SELECT count(*) FILTER (WHERE few.category = 'timeout')
        FROM (
            SELECT category FROM lineshaft.task_end
            WHERE status = 'DEAD_LETTERED' AND status <> 'COMPLETED' ORDER BY ended_at DESC LIMIT %(most)s::integer
        ) AS few
    )::integer AS timed_out,
    (
        SELECT count(*)
        FROM (SELECT id, status, is_batch FROM lineshaft.task_live ORDER BY id LIMIT %(most)s::integer) AS few
        WHERE few.status = 'PENDING' AND few.is_batch AND EXISTS (
            WITH RECURSIVE inside AS (
                SELECT child.id, child.is_batch FROM lineshaft.task AS child WHERE child.parent_id = few.id
                UNION ALL
                SELECT child.id, child.is_batch
                FROM inside JOIN lineshaft.task AS child ON child.parent_id = inside.id AND inside.is_batch
            )
            SELECT FROM inside
            LEFT JOIN lineshaft.task_live AS going ON going.id = inside.id
            LEFT JOIN lineshaft.task_end AS gone ON gone.id = inside.id
            WHERE coalesce(going.first_started_at, gone.first_started_at) IS NOT NULL
        )
    )::integer AS batches_started,
    (
        SELECT extract(epoch FROM avg(few.ended_at - few.started_at) FILTER (WHERE few.status = 'COMPLETED'))
        FROM (SELECT status, started_at, ended_at FROM lineshaft.task_end ORDER BY ended_at DESC LIMIT %(ends)s::integer) AS few
    )::double precision AS average_sec
