-- Each range is read by the primary key, or by task_of_dag, and stops at `most` ids. One with an end has the ids of a millisecond.

-- name: plan_by_index
-- In order, so that LIMIT stops the scan.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true)

-- name: task_ids
WITH exact AS MATERIALIZED (SELECT id FROM lineshaft.task WHERE id = %(text)s::text)
SELECT id FROM exact
UNION
SELECT found.id
FROM unnest(%(lows)s::text[], %(highs)s::text[], %(ends)s::text[]) AS place (low, high, tail)
CROSS JOIN LATERAL (
    SELECT task.id FROM lineshaft.task
    WHERE task.id >= place.low COLLATE "C" AND task.id < place.high COLLATE "C" AND right(task.id, length(place.tail)) = place.tail
    ORDER BY task.id
    LIMIT %(most)s::integer
) AS found
WHERE NOT EXISTS (SELECT FROM exact)
ORDER BY id
LIMIT %(most)s::integer

-- name: dag_ids
-- Also virtual DAGs, which exist only as the dag_id of a task.
WITH exact AS MATERIALIZED (
    SELECT dag_id AS id FROM lineshaft.task WHERE dag_id = %(text)s::text ORDER BY dag_id, id LIMIT 1
)
SELECT id FROM exact
UNION
SELECT found.id
FROM unnest(%(lows)s::text[], %(highs)s::text[], %(ends)s::text[]) AS place (low, high, tail)
CROSS JOIN LATERAL (
    SELECT DISTINCT member.dag_id AS id
    FROM (
        SELECT task.dag_id FROM lineshaft.task
        WHERE task.dag_id >= place.low COLLATE "C" AND task.dag_id < place.high COLLATE "C"
        ORDER BY task.dag_id, task.id
        LIMIT 20000
    ) AS member
    WHERE right(member.dag_id, length(place.tail)) = place.tail
) AS found
WHERE NOT EXISTS (SELECT FROM exact)
ORDER BY id
LIMIT %(most)s::integer
