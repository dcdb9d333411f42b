"""Write revision 0001's SQL anew from `ledger.schema`. Only until the first release.

    python tools/freeze_schema.py

After a release the file is fixed and a change of the tables is a new revision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sqlalchemy import create_mock_engine
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from celery_durable import migrations
from celery_durable.ledger.schema import METADATA

TARGET = Path(migrations.__file__).parent / "versions" / "r0001_ledger.sql"


def frozen() -> str:
    """Return every statement of `METADATA.create_all` but the schema's, which env.py creates."""
    dialect = PGDialect_psycopg(paramstyle="named")  # else every % comes out twice
    found: list[str] = []

    def keep(statement: Any, *_: Any, **__: Any) -> None:
        # each stripped line, so that no statement holds an empty one
        lines = str(statement.compile(dialect=dialect)).strip().splitlines()
        found.append("\n".join(line.rstrip() for line in lines if line.strip()))

    METADATA.create_all(create_mock_engine("postgresql+psycopg://", keep), checkfirst=False)
    return migrations.SEPARATOR.join(s for s in found if not s.startswith("CREATE SCHEMA")) + ";\n"


if __name__ == "__main__":
    TARGET.write_text(frozen(), encoding="utf-8")
    sys.stdout.write(f"wrote {TARGET.name}\n")
