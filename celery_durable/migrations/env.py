"""Alembic's entry: runs revisions on a connection that was handed in, or writes them as SQL.

Takes no lock and never commits a transaction it was handed; `ledger.migrate` does the first, its
caller the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alembic import context
from sqlalchemy import text

from celery_durable.migrations import SCHEMA

if TYPE_CHECKING:
    from sqlalchemy import Connection


def _online(connection: Connection) -> None:
    # CREATE SCHEMA IF NOT EXISTS wants a privilege even where there is nothing to create
    if connection.scalar(text("SELECT pg_catalog.to_regnamespace(:name) IS NULL"), {"name": SCHEMA}):
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    context.configure(connection=connection, version_table_schema=SCHEMA, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


def _offline() -> None:
    context.configure(
        dialect_name="postgresql",
        version_table_schema=SCHEMA,
        transactional_ddl=True,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        context.run_migrations()


if context.is_offline_mode():
    _offline()
else:
    _online(context.config.attributes["connection"])
