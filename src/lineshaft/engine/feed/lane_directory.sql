-- name: lanes_of
-- Lanes with these types, or all lanes: few, and they never change.
SELECT id, type, required_capabilities, models FROM lineshaft.lane
WHERE %(types)s::text[] IS NULL OR type = ANY (%(types)s::text[])
