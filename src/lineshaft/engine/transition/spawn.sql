-- name: book_cost
UPDATE lineshaft.task_live
SET attempt_cost_usd = greatest(attempt_cost_usd, %(cost)s::numeric)
WHERE id = %(id)s::text AND epoch = %(epoch)s::integer AND status = 'RUNNING'

-- name: child_ends
SELECT id, status::text AS status, output FROM lineshaft.task_end WHERE id = ANY (%(ids)s::text[])
