-- name: current_incarnation
SELECT incarnation FROM lineshaft.agent WHERE id = %(agent_id)s::text
