"""The first ledger: runs, steps, attempts, waits, events and what serves them."""

from __future__ import annotations

from pathlib import Path

from alembic import op

from celery_durable.migrations import statements

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table; the SQL stands beside this file."""
    for statement in statements(Path(__file__).with_suffix(".sql")):
        op.execute(statement)
    op.execute("INSERT INTO durable.schema_version (revision) VALUES (1)")


def downgrade() -> None:
    """Refuse: it would drop every run."""
    message = "the ledger has no way back below its first revision; drop the schema 'durable' by hand"
    raise NotImplementedError(message)
