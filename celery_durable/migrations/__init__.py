"""The ledger's migrations, run by Alembic with a version table of their own.

A revision must not change when the code does: it is written out, never built from `ledger.schema`.
Revision n has the Alembic id `f"{n:04}"` and leaves n in `durable.schema_version`.
`celery_durable.ledger.migrate` is the way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import TextClause

SCHEMA = "durable"
SEPARATOR = ";\n\n"


def statements(path: Path) -> list[TextClause]:
    """Read a frozen file of SQL: one statement each, a semicolon and an empty line between them."""
    from sqlalchemy import text

    body = path.read_text(encoding="utf-8").strip().removesuffix(";")
    return [text(statement.replace(":", "\\:")) for statement in body.split(SEPARATOR)]
