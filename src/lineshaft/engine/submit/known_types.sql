-- name: read_types
-- The limits as text: a caller's connection has its own idea of what JSON becomes.
SELECT type, revision, limits::text AS limits FROM lineshaft.task_type
