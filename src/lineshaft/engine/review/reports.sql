-- fragment: reports
SELECT task.id, task.type, task.title, task.dag_id, ended.agent_id, ended.model, ended.ended_at, ended.decision_report
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
WHERE ended.decision_report IS NOT NULL

-- fragment: newest_first
  AND (%(type)s::text IS NULL OR task.type = %(type)s::text)
  AND (%(dag_id)s::text IS NULL OR task.dag_id = %(dag_id)s::text)
  AND (%(upto)s::timestamptz IS NULL OR (ended.ended_at, ended.id) < (%(upto)s::timestamptz, %(before)s::text))
ORDER BY ended.ended_at DESC, ended.id DESC
LIMIT %(limit)s::integer

-- name: search_reports
-- By task_end_report_words; matching rows are sorted, so a frequent word is expensive.
-- include: reports
  AND to_tsvector('pg_catalog.simple'::regconfig, ended.decision_report) @@ websearch_to_tsquery('pg_catalog.simple', %(query)s::text)
-- include: newest_first

-- name: latest_reports
-- By task_end_by_age.
-- include: reports
-- include: newest_first
