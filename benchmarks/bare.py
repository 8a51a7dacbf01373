"""The floor's table and its claim: the plainest queue in SQL. It imports nothing."""

BARE_TABLE = """
DROP TABLE IF EXISTS public.bare;
CREATE TABLE public.bare (
    id text COLLATE "C" PRIMARY KEY, status text NOT NULL, rank double precision, no bigint, agent text,
    lease timestamptz, payload jsonb
);
CREATE INDEX ON public.bare (rank, no) WHERE status = 'READY';
"""
BARE_CLAIM = """
UPDATE public.bare SET status = 'RUNNING', agent = 'a', lease = now() + interval '90 seconds'
WHERE id IN (
    SELECT id FROM public.bare WHERE status = 'READY' ORDER BY rank, no LIMIT %s FOR UPDATE SKIP LOCKED
)
RETURNING id, payload
"""
