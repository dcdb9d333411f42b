"""What replay reads: a run's steps, unusual attempts and open waits, in a later statement than the claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from celery_durable.ledger import sql
from celery_durable.ledger.rows import AttemptRow, OpenWait, StepRow

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection


@dataclass(slots=True)
class History:
    """A run's past, by seq."""

    steps: dict[int, StepRow] = field(default_factory=dict)
    attempts: dict[int, list[AttemptRow]] = field(default_factory=dict)
    waits: dict[int, list[OpenWait]] = field(default_factory=dict)
    last: int = 0

    def wait(self, seq: int, kind: str) -> OpenWait | None:
        """The open wait of this kind at `seq`."""
        return next((w for w in self.waits.get(seq, ()) if w.kind == kind), None)


_STEPS = """
SELECT seq, kind, name, mode, state, attempt, input_digest, output::text, error::text, wait_seq, child_run
FROM durable.steps WHERE run_id = %(run)s ORDER BY seq"""
_ATTEMPTS = """
SELECT seq, attempt, outcome, begun, forgiven, code_digest,
  extract(epoch FROM durable.now() - coalesce(started_at, ended_at))::float8
FROM durable.attempts WHERE run_id = %(run)s ORDER BY seq, attempt"""
_WAITS = """
SELECT id, seq, kind, pending, extract(epoch FROM due_at - durable.now())::float8
FROM durable.waits WHERE run_id = %(run)s AND state = 'open'"""


def read(conn: Connection, run_id: UUID) -> History:
    """Everything replay needs, in one round trip."""
    params = {"run": run_id}
    below = sql.driver(conn)
    with below.pipeline():
        steps, attempts, waits = (below.execute(statement, params) for statement in (_STEPS, _ATTEMPTS, _WAITS))
    history = History()
    for found in steps:
        history.steps[found[0]] = StepRow(*found)
        history.last = found[0]
    for found in attempts:
        history.attempts.setdefault(found[0], []).append(AttemptRow(*found))
    for found in waits:
        history.waits.setdefault(found[1], []).append(OpenWait(*found))
    return history


def attempts_of(conn: Connection, run_id: UUID, seq: int) -> list[AttemptRow]:
    """The unusual attempts of one step."""
    found = sql.rows(
        conn, _ATTEMPTS.replace("ORDER BY", "AND seq = %(seq)s ORDER BY"), {"run": run_id, "seq": seq}
    )
    return [AttemptRow(*row) for row in found]
