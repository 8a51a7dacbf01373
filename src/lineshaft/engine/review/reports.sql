-- Decision reports of completed tasks. Used by store/reports.py.

-- name: search_reports
-- By words, newest first. By task_end_report_words; found rows are sorted, so a word that is everywhere costs what it says.
SELECT task.id, task.type, task.title, task.dag_id, ended.agent_id, ended.model, ended.ended_at, ended.decision_report
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
WHERE ended.decision_report IS NOT NULL
  AND to_tsvector('pg_catalog.simple'::regconfig, ended.decision_report) @@ websearch_to_tsquery('pg_catalog.simple', %(query)s::text)
  AND (%(type)s::text IS NULL OR task.type = %(type)s::text)
  AND (%(dag_id)s::text IS NULL OR task.dag_id = %(dag_id)s::text)
  AND (%(upto)s::timestamptz IS NULL OR (ended.ended_at, ended.id) < (%(upto)s::timestamptz, %(before)s::text))
ORDER BY ended.ended_at DESC, ended.id DESC
LIMIT %(limit)s::integer

-- name: latest_reports
-- Without words: newest first. By task_end_by_age.
SELECT task.id, task.type, task.title, task.dag_id, ended.agent_id, ended.model, ended.ended_at, ended.decision_report
FROM lineshaft.task_end AS ended
JOIN lineshaft.task ON task.id = ended.id
WHERE ended.decision_report IS NOT NULL
  AND (%(type)s::text IS NULL OR task.type = %(type)s::text)
  AND (%(dag_id)s::text IS NULL OR task.dag_id = %(dag_id)s::text)
  AND (%(upto)s::timestamptz IS NULL OR (ended.ended_at, ended.id) < (%(upto)s::timestamptz, %(before)s::text))
ORDER BY ended.ended_at DESC, ended.id DESC
LIMIT %(limit)s::integer
