"""What the database said, told as errors of this package.

Knows SQLSTATEs and libpq's words; knows no statement of the ledger. For the ledger's own statements
only: a user's SQL inside a step raises what it raises.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from celery_durable.errors import ConfigurationError, DurableError, LedgerUnavailable, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

MIGRATE = "celery -A <app> durable migrate"

# SQLSTATE, or the beginning of one -> what to raise and what to do. The first that fits counts.
_BY_STATE: tuple[tuple[str, type[DurableError], str], ...] = (
    ("25006", LedgerUnavailable, "is read-only (a standby, or a primary that was demoted): point durable_ledger_url at the primary, or add ?target_session_attrs=read-write"),
    ("57P03", LedgerUnavailable, "is starting up, shutting down or in recovery: try again in a moment"),
    ("57P", LedgerUnavailable, "closed the connection (restart, crash or an administrator): try again"),
    ("533", LedgerUnavailable, "has no connection left: raise max_connections, or put a pooler in front"),
    ("53", LedgerUnavailable, "ran out of disk or memory: free some, then try again"),
    ("08", LedgerUnavailable, "lost the connection: try again"),
    ("28", ConfigurationError, "refused the login: check user and password in durable_ledger_url, and pg_hba.conf"),
    ("3D000", ConfigurationError, "has no such database: create it, or correct durable_ledger_url"),
    ("42501", ConfigurationError, f"denies a privilege: run the grants that `{MIGRATE} --grants ROLE` prints"),
)  # fmt: skip

# Failures to connect carry no SQLSTATE, only the server's or libpq's words.
_BY_WORDS: tuple[tuple[str, type[DurableError], str], ...] = (
    (r"password authentication failed|no password supplied|pg_hba\.conf|role \".*\" does not exist|authentication", ConfigurationError, "refused the login: check user and password in durable_ledger_url, and pg_hba.conf"),
    (r"database \".*\" does not exist|no such database", ConfigurationError, "has no such database: create it, or correct durable_ledger_url"),
    (r"invalid (connection|URI|port|integer)|missing \"=\"|certificate|server does not support SSL|sslmode", ConfigurationError, "cannot be reached with these options: correct durable_ledger_url"),
    (r"starting up|shutting down|recovery|not (yet )?accepting connections", LedgerUnavailable, "is starting up, shutting down or in recovery: try again in a moment"),
    (r"read-only|not in (hot )?standby|session is not read-write", LedgerUnavailable, "is read-only (a standby, or a primary that was demoted): point durable_ledger_url at the primary"),
    (r"too many (clients|connections)|remaining connection slots|no more connections", LedgerUnavailable, "has no connection left: raise max_connections, or put a pooler in front"),
    (r"translate host name|resolve host|Name or service not known|nodename nor servname|name resolution", LedgerUnavailable, "has a host name that cannot be resolved: check durable_ledger_url and DNS"),
    (r"Connection refused|No such file or directory", LedgerUnavailable, "refused the connection: is Postgres running there?"),
    (r"timeout|timed out", LedgerUnavailable, "did not answer in time: is the host reachable?"),
)  # fmt: skip

_MISSING = re.compile(r"(relation|function|schema|table|column).*\bdurable\b.*does not exist")


def where(url: URL) -> str:
    """Host, port and database of a URL, never its password."""
    hosts = url.query.get("host", url.host or "localhost")
    host = hosts if isinstance(hosts, str) else ",".join(hosts)
    port = f":{url.port}" if url.port else ""
    return f"the ledger's Postgres at {host}{port}, database {url.database or url.username or 'postgres'!r},"


def translate(exc: BaseException, place: str = "the ledger's Postgres") -> DurableError | None:
    """Return our error for SQLAlchemy's or psycopg's, or None where theirs says it best."""
    if isinstance(exc, PoolTimeout):
        return LedgerUnavailable(f"{place} was not asked: every connection of this process's pool is in use")
    fault = exc.orig if isinstance(exc, DBAPIError) else exc
    if not isinstance(fault, psycopg.Error):
        return None
    words = _first_line(fault)
    if fault.sqlstate is not None:
        if fault.sqlstate in {"42P01", "42883", "3F000", "42703"} and _MISSING.search(words):
            return SchemaMismatch(f"{place} has no ledger, or an older one: run `{MIGRATE}` ({words})")
        found = [(kind, told) for state, kind, told in _BY_STATE if fault.sqlstate.startswith(state)]
    elif isinstance(fault, psycopg.ProgrammingError | psycopg.OperationalError | psycopg.InterfaceError):
        found = [(kind, told) for pattern, kind, told in _BY_WORDS if re.search(pattern, words, re.IGNORECASE)]
        if isinstance(fault, psycopg.OperationalError):
            found.append((LedgerUnavailable, "lost the connection: try again"))
    else:
        found = []
    if not found:
        return None
    kind, told = found[0]
    return kind(f"{place} {told} ({words})")


@contextmanager
def speaking(place: str = "the ledger's Postgres") -> Iterator[None]:
    """Raise our errors instead of SQLAlchemy's and psycopg's, where there is one that says more."""
    try:
        yield
    except (SQLAlchemyError, psycopg.Error) as exc:
        told = translate(exc, place)
        if told is None:
            raise
        raise told from exc


def _first_line(fault: psycopg.Error) -> str:
    """Return the server's sentence; libpq's detail follows in other lines."""
    text = fault.diag.message_primary or str(fault)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("connection failed") and len(lines) > 1 and lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0] if lines else type(fault).__name__
