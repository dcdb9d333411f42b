"""The schema's revision: bring it up, write it as SQL, grant on it, judge it.

Alembic is imported only to migrate: a worker that judges its ledger never loads it.
"""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from celery_durable.errors import ConfigurationError, SchemaMismatch
from celery_durable.ledger.faults import MIGRATE

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

SCHEMA_REVISION: Final = 1  # what this code was written for

_LOCK: Final = 0x64_75_72_61_62_6C_65  # "durable", in the advisory locks of this database
_one_at_a_time = threading.Lock()  # Alembic's context is global to the process

# What the run-time role does to each table. A lock (FOR NO KEY UPDATE) needs UPDATE too.
_GRANTS: Final[dict[str, str]] = {
    "schema_version": "SELECT",
    "clock": "SELECT",  # moved only by tests, as the owner
    "workers": "SELECT, INSERT, UPDATE, DELETE",
    "runs": "SELECT, INSERT, UPDATE",
    "steps": "SELECT, INSERT, UPDATE",
    "attempts": "SELECT, INSERT, UPDATE",
    "waits": "SELECT, INSERT, UPDATE",
    "memos": "SELECT, INSERT",
    "events": "SELECT, INSERT",  # its identity column needs no grant on the sequence
    "sweeps": "SELECT, INSERT, UPDATE",
}


def upgrade(connection: Connection) -> int | None:
    """Bring the schema to this code's revision; return the revision it had, None for no schema.

    Runs in the connection's transaction, which the caller commits. Of two at once the second waits
    for the first's commit and then finds nothing to do.

    Raises:
        SchemaMismatch: the schema is newer than this code.
        ConfigurationError: the connection is in autocommit mode.
    """
    from alembic import command

    if getattr(connection.connection.driver_connection, "autocommit", False):
        raise ConfigurationError("migrations run in one transaction: give upgrade() a connection that is not in autocommit")
    _wait_for_others(connection)
    before = current_revision(connection)
    if before is not None and before > SCHEMA_REVISION:
        raise SchemaMismatch(_too_new(before))
    config = _config()
    config.attributes["connection"] = connection
    with _one_at_a_time:
        command.upgrade(config, "head")
    return before


def upgrade_sql(since: int = 0) -> str:
    """Return the SQL from revision `since` (0: nothing there) to this code's, for those who run their own.

    One transaction, with Alembic's version table kept, so that `upgrade` finds nothing to do after it.
    """
    from alembic import command

    written = io.StringIO()
    config = _config(output_buffer=written)
    with _one_at_a_time:
        command.upgrade(config, f"{_alembic_id(since)}:head" if since else "head", sql=True)
    return written.getvalue()


def grants_sql(role: str) -> str:
    """Return the least privileges of the role that workers and web processes log in with."""
    name = quoted_role(role)
    lines = [
        f"GRANT USAGE ON SCHEMA durable TO {name};",
        f"GRANT EXECUTE ON FUNCTION durable.now() TO {name};",
        *(f"GRANT {verbs} ON durable.{table} TO {name};" for table, verbs in _GRANTS.items()),
    ]
    return "\n".join(lines) + "\n"


def quoted_role(role: str) -> str:
    """Return a role's name as a quoted identifier.

    Raises:
        ConfigurationError: Postgres could not mean this name, or would cut it to another one.
    """
    if not role or "\0" in role or len(role.encode()) > 63:
        raise ConfigurationError(f"not a role's name (1 to 63 bytes, no NUL): {role!r}")
    return '"' + role.replace('"', '""') + '"'


def current_revision(connection: Connection) -> int | None:
    """Return the schema's revision, None where there is no ledger. Only reads."""
    there = text(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = 'durable' AND c.relname = 'schema_version')",
    )
    if not connection.scalar(there):
        return None
    revision: int | None = connection.scalar(text("SELECT revision FROM durable.schema_version"))
    return revision


def check_schema(connection: Connection) -> int:
    """Return the schema's revision if this code can work with it: its own, or the next one.

    The next one too, because the schema is migrated first and the fleet then rolls.

    Raises:
        SchemaMismatch: missing or older (migrate), or too new (upgrade the package).
    """
    revision = current_revision(connection)
    if revision is None:
        raise SchemaMismatch(f"the database holds no ledger: run `{MIGRATE}`")
    if revision < SCHEMA_REVISION:
        raise SchemaMismatch(
            f"the ledger is at revision {revision}, this code needs {SCHEMA_REVISION}: run `{MIGRATE}`",
        )
    if revision > SCHEMA_REVISION + 1:
        raise SchemaMismatch(_too_new(revision))
    return revision


def _too_new(revision: int) -> str:
    return (
        f"the ledger is at revision {revision}, this code knows {SCHEMA_REVISION} and works with up to "
        f"{SCHEMA_REVISION + 1}: upgrade celery_durable in this environment"
    )


def _wait_for_others(connection: Connection) -> None:
    """Take the advisory lock, however long the other migration takes: lock_timeout counts for it too."""
    limit = connection.scalar(text("SELECT current_setting('lock_timeout')"))
    set_limit = text("SELECT set_config('lock_timeout', :limit, true)")
    connection.execute(set_limit, {"limit": "0"})
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    connection.execute(set_limit, {"limit": limit})


def _alembic_id(revision: int) -> str:
    return f"{revision:04}"


def _config(**options: Any) -> Config:
    from alembic.config import Config

    config = Config(**options)
    config.set_main_option("script_location", "celery_durable:migrations")
    config.set_main_option("path_separator", "os")
    return config
