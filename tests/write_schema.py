"""`make schema`: migrates an empty database and writes down what came of it."""

import sys
import tempfile
from pathlib import Path

import psycopg

from lineshaft.embedded import EmbeddedServer
from lineshaft.engine.postgres import describe, migrate

TARGET = Path(__file__).parent.parent / "src/lineshaft/engine/postgres/schema.sql"

with tempfile.TemporaryDirectory() as home, EmbeddedServer.start(Path(home)) as server:
    migrate.up(server.dsn)
    with psycopg.connect(server.dsn) as connection:
        TARGET.write_text(describe.describe(connection), encoding="utf-8")
sys.stdout.write(f"Wrote {TARGET.relative_to(Path.cwd())}\n")
