"""A caller's open transaction as a SQLAlchemy Connection: `start(…, using=…)`.

Takes a SQLAlchemy Connection, an ORM Session or a psycopg connection. Never commits, rolls back or
closes anything of the caller's.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.pool import StaticPool

from celery_durable.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPILED: dict[Any, Any] = {}  # the few statements that travel this way, compiled once per process


@contextmanager
def as_connection(using: Any) -> Iterator[Connection]:
    """Yield a Connection in the caller's transaction.

    Args:
        using: SQLAlchemy Connection, ORM Session (or scoped_session), or psycopg connection; to the
            ledger's own database.

    Raises:
        ArgumentError: it is something else, or is asynchronous, or speaks to no Postgres.
    """
    if isinstance(using, psycopg.Connection):
        with _engine(using).connect() as connection:
            yield connection.execution_options(compiled_cache=_COMPILED)
        return
    connection = using if isinstance(using, Connection) else _of_session(using)
    if connection.dialect.name != "postgresql":
        raise ArgumentError(f"using= needs a connection to the ledger's Postgres, not to {connection.dialect.name}")
    yield connection


def _of_session(using: Any) -> Connection:
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(using, Session | scoped_session):
        return using.connection()
    raise ArgumentError(
        "using= takes a SQLAlchemy Connection, an ORM Session or a psycopg connection (synchronous ones), "
        f"not {type(using).__module__}.{type(using).__qualname__}",
    )


class _Borrowed:
    """A psycopg connection whose transaction belongs to somebody else."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._lender = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lender, name)

    def cursor(self) -> psycopg.Cursor[tuple[Any, ...]]:
        """Return a plain cursor, whatever factories the caller has set."""
        return psycopg.Cursor(self._lender, row_factory=tuple_row)

    def commit(self) -> None:
        """Do nothing: the caller commits."""

    def rollback(self) -> None:
        """Do nothing: the caller rolls back."""

    def close(self) -> None:
        """Do nothing: the caller closes."""


@cache
def _dialect() -> PGDialect_psycopg:
    return PGDialect_psycopg(dbapi=psycopg)  # type: ignore[no-untyped-call]


def _engine(lender: psycopg.Connection[Any]) -> Engine:
    """Return an engine on one connection.

    Not by `create_engine`: that asks the server about itself at first, and ends with a rollback.
    """

    def lend() -> Any:
        return _Borrowed(lender)

    pool = StaticPool(lend, reset_on_return=None)
    return Engine(pool, _dialect(), make_url("postgresql+psycopg://"))
