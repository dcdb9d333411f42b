"""How verbs talk to Postgres, and the SQL they share.

Statements are text, run on the psycopg connection below the SQLAlchemy one: the same transaction, without
Core's cost per statement, which is a third of a checkpoint. Errors are psycopg's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

Row = tuple[Any, ...]


def driver(conn: Connection) -> psycopg.Connection[Row]:
    """The psycopg connection below."""
    below = conn.connection.driver_connection
    assert isinstance(below, psycopg.Connection)  # noqa: S101 - for the type checker; the URL was checked
    return below


def rows(conn: Connection, statement: str, params: Mapping[str, Any]) -> list[Row]:
    """Run a statement that returns rows."""
    return driver(conn).execute(statement, params).fetchall()  # type: ignore[arg-type]


def row(conn: Connection, statement: str, params: Mapping[str, Any]) -> Row | None:
    """Run a statement that returns at most one row that matters."""
    return driver(conn).execute(statement, params).fetchone()  # type: ignore[arg-type]


def run(conn: Connection, statement: str, params: Mapping[str, Any]) -> int:
    """Run a statement; how many rows it touched."""
    return driver(conn).execute(statement, params).rowcount  # type: ignore[arg-type]


# Intents and completions never commit more weakly than `on`; a stricter setting is kept. Local to the
# transaction, and so also right behind a pooler.
DURABLE_COMMIT = (
    "set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply')"
    " THEN current_setting('synchronous_commit') ELSE 'on' END, true)"
)

# A process frozen between the fence statement and its COMMIT holds the run's row: not for long.
FROZEN_LIMIT = "set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, true)"
