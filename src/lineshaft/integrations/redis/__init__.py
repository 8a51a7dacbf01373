"""Redis or Valkey, where `LINESHAFT_REDIS_URL` names one (the extra `redis`).

This room talks to the server: connections with short deadlines, its lists and its streams. It may import
settings and errors only: it knows nothing about the database, and nothing that matters is only in Redis.
"""
