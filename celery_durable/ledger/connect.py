"""The way to the ledger: one lazy engine per process, transactions that commit durably.

Owns connections, their options and their end. Knows no table. A process that forks keeps its engine;
the child forgets it without touching the parent's sockets and opens its own at first use. Nothing
here connects at import or before it is asked.

Session settings would be lost behind a pooler in transaction mode: what must hold for a transaction
is set in it, locally.
"""

from __future__ import annotations

import math
import os
import select
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError as BadUrl
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import QueuePool

from celery_durable.errors import ConfigurationError, LedgerUnavailable
from celery_durable.ledger import migrate
from celery_durable.ledger.faults import speaking, translate, where

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

OLDEST_SERVER: Final = 14

# Raise synchronous_commit to `on`, never lower it: off < local < remote_write < on < remote_apply.
# Decides at commit, so it may stand anywhere in a transaction, also in an autocommitted statement;
# but where it is really evaluated: a SELECT in a WITH that nothing reads is not.
AT_LEAST_ON: Final = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"
)

_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


class CommitUnknown(LedgerUnavailable):
    """The COMMIT was sent and its answer never came: read the ledger to know."""


@dataclass(frozen=True, slots=True)
class UserTransaction:
    """An open transaction that runs a user's SQL.

    Attributes:
        connection: in the transaction.
        id: its transaction id, fixed at its start; another one later means that it was ended inside.
    """

    connection: Connection
    id: int


class Ledger:
    """Connections to one ledger.

    Args:
        url: SQLAlchemy URL; `postgresql://` means psycopg 3. Options in its query win over ours.
        prepare_statements: False behind a pooler that cannot keep prepared statements.
        connect_timeout: how long one attempt to connect may take.
        lock_timeout: how long a statement of the ledger waits for a lock.
        pool_size: connections kept per process; as many again may be opened under load.
    """

    def __init__(
        self,
        url: str,
        *,
        prepare_statements: bool = True,
        connect_timeout: timedelta = timedelta(seconds=5),
        lock_timeout: timedelta = timedelta(seconds=5),
        pool_size: int = 5,
    ) -> None:
        self.url = _parsed(url)
        self.place = where(self.url)
        self._prepare_statements = prepare_statements
        self._connect_timeout = connect_timeout
        self._pool_size = pool_size
        lock_ms = math.ceil(lock_timeout.total_seconds() * 1000)
        self._arm = f"SELECT {AT_LEAST_ON}, set_config('lock_timeout', '{lock_ms}', true)"
        self._forget()
        _ledgers.add(self)

    def _forget(self) -> None:
        """Start empty; in a forked child the parent's engine is dropped and its sockets left alone."""
        # Kept, not freed: the end of a pooled connection would speak on the parent's socket.
        self._inherited: list[Engine] = [*getattr(self, "_inherited", ()), *self._mine()]
        self._engine: Engine | None = None
        self._revision: int | None = None
        self._guard = threading.Lock()

    def _mine(self) -> list[Engine]:
        engine = getattr(self, "_engine", None)
        return [] if engine is None else [engine]

    @property
    def engine(self) -> Engine:
        """This process's engine, made at first use. Making it does not connect."""
        if self._engine is None:
            with self._guard:
                if self._engine is None:
                    self._engine = self._make_engine()
        return self._engine

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """BEGIN … COMMIT, or ROLLBACK when the block raises.

        Raises:
            LedgerUnavailable, ConfigurationError: no connection could be had.
            CommitUnknown: the connection broke, or something interrupted, during COMMIT.
        """
        with self._open() as connection:
            self._first(connection, self._arm)
            with _committing(connection, self.place):
                yield connection

    @contextmanager
    def user_transaction(self) -> Iterator[UserTransaction]:
        """As `transaction`, for a user's SQL: with its id, and without our lock_timeout."""
        with self._open() as connection:
            row = self._first(connection, f"SELECT {AT_LEAST_ON}, pg_current_xact_id()::text::bigint")
            with _committing(connection, self.place):
                yield UserTransaction(connection, row[1])

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """Yield a connection on which each statement is its own transaction (see AT_LEAST_ON)."""
        with self._open() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def check(self) -> int:
        """Return the schema's revision; connects and judges it once per process.

        Raises:
            SchemaMismatch: `migrate.check_schema` says which way, and the command that mends it.
            ConfigurationError: the server is too old.
            LedgerUnavailable: it cannot be reached.
        """
        if self._revision is None:
            with self._open() as connection, speaking(self.place):
                _check_server(connection, self.place)
                self._revision = migrate.check_schema(connection)
        return self._revision

    def dispose(self) -> None:
        """Close this process's idle connections; the next use opens new ones."""
        with self._guard:
            engine, self._engine, self._revision = self._engine, None, None
        if engine is not None:
            engine.dispose()

    @contextmanager
    def _open(self) -> Iterator[Connection]:
        with speaking(self.place):
            connection = self.engine.connect()
        with connection:
            yield connection

    def _first(self, connection: Connection, statement: str) -> tuple[Any, ...]:
        """Begin, and run the settings as the transaction's first statement.

        On the driver's cursor: nothing to compile, half the cost of a statement through SQLAlchemy.
        """
        connection.begin()
        fairy = connection.connection
        try:
            cursor = fairy.cursor()
            cursor.execute(statement)
            row: tuple[Any, ...] = cursor.fetchone()
            cursor.close()
        except psycopg.Error as exc:
            connection.invalidate(exc)
            told = translate(exc, self.place)
            if told is None:
                raise
            raise told from exc
        return row

    def _make_engine(self) -> Engine:
        engine = create_engine(
            self.url,
            poolclass=QueuePool,
            pool_size=self._pool_size,
            max_overflow=self._pool_size,
            pool_use_lifo=True,
            connect_args=self._connect_args(),
        )
        event.listen(engine, "checkout", _refuse_dead)
        return engine

    def _connect_args(self) -> dict[str, Any]:
        ours = {
            "connect_timeout": max(2, math.ceil(self._connect_timeout.total_seconds())),  # libpq's least
            "application_name": "celery_durable",
            # a peer that vanished is noticed after 10 + 3 x 5 s idle, or 15 s after sending
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 15_000,
        }
        arguments: dict[str, Any] = {k: v for k, v in ours.items() if k not in self.url.query}
        if not self._prepare_statements:
            arguments["prepare_threshold"] = None
        return arguments


def _parsed(url: str) -> URL:
    """Read the URL. Messages never repeat it: it may hold a password in a place we do not expect."""
    try:
        parsed = make_url(url)
    except (BadUrl, ValueError):
        raise ConfigurationError(
            "durable_ledger_url is not a URL: write postgresql+psycopg://user:password@host:5432/database "
            "(with special characters of the password percent-encoded)",
        ) from None
    if parsed.drivername in {"postgresql", "postgres"}:
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername != "postgresql+psycopg":
        raise ConfigurationError(
            f"durable_ledger_url begins with {parsed.drivername}://; the ledger needs postgresql+psycopg:// "
            "(psycopg 3; other drivers may stay in use beside it)",
        )
    return parsed


def _check_server(connection: Connection, place: str) -> None:
    version = connection.dialect.server_version_info or (0,)  # type: ignore[attr-defined]
    if version[0] < OLDEST_SERVER:
        raise ConfigurationError(f"{place} is PostgreSQL {version[0]}; celery_durable needs {OLDEST_SERVER} or newer")


@contextmanager
def _committing(connection: Connection, place: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _roll_back(connection)
        raise
    driver: Any = connection.connection.driver_connection
    if driver.pgconn.transaction_status == TransactionStatus.INERROR:
        # COMMIT would roll back and say nothing: somebody swallowed the error of a statement
        _roll_back(connection)
        raise psycopg.errors.InFailedSqlTransaction("a statement failed and its error was caught: nothing is committed")
    try:
        connection.commit()
    except Exception as exc:
        if _refused(exc):
            raise
        raise CommitUnknown(f"{place} did not answer the COMMIT: {type(exc).__name__}: {exc}") from exc


def _roll_back(connection: Connection) -> None:
    """Roll back; on a broken connection the server does it, and the block's own error counts."""
    try:
        connection.rollback()
    except (DBAPIError, psycopg.Error):
        connection.invalidate()


def _refused(exc: Exception) -> bool:
    """Whether the server itself answered that it did not commit."""
    fault = exc.orig if isinstance(exc, DBAPIError) else exc
    state = fault.sqlstate if isinstance(fault, psycopg.Error) else None
    return state is not None and not state.startswith(("08", "57P", "XX"))


def _refuse_dead(driver: Any, _record: Any, _fairy: Any) -> None:
    """Drop an idle connection that the server has closed. One poll of the socket, no round trip."""
    waiting = select.poll()
    waiting.register(driver.fileno(), select.POLLIN)
    if not waiting.poll(0):
        return
    try:
        driver.pgconn.consume_input()  # a notice, a changed parameter: fine
    except psycopg.Error as exc:
        raise DisconnectionError(str(exc)) from exc
    if waiting.poll(0):  # still readable: the end of the stream
        raise DisconnectionError("the server closed the connection")


def _after_fork() -> None:
    for ledger in list(_ledgers):
        ledger._forget()  # noqa: SLF001  # the module's own class


os.register_at_fork(after_in_child=_after_fork)
