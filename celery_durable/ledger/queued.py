"""Verbs of a queued step: claim, outcome, release. It carries its own claim and fence.

An outcome locks the run first and, in later statements, updates the step and the counter on its wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_durable.errors import FenceLost
from celery_durable.ledger import runs, sql
from celery_durable.ledger.rows import ClaimedStep, Owner, Wake

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection

    from celery_durable.ledger.rows import Claim
    from celery_durable.ledger.steps import StepWrite

_CLAIM = f"""
WITH s AS (
  UPDATE durable.steps SET state = 'started', fence = steps.fence + 1, claim = %(token)s, owner_worker = %(worker)s,
    owner_pid = %(pid)s, owner_ticks = %(ticks)s, started_at = durable.now(), next_wake_at = NULL, wake_count = 0,
    attempt = 1 + coalesce((SELECT max(a.attempt) FROM durable.attempts a
                            WHERE a.run_id = %(run)s AND a.seq = %(seq)s), 0)
  FROM (SELECT q.run_id, q.seq, r.namespace, r.name AS run_name FROM durable.steps q JOIN durable.runs r ON r.id = q.run_id
        WHERE q.run_id = %(run)s AND q.seq = %(seq)s AND q.state = 'queued' AND r.namespace = %(namespace)s
          AND r.state NOT IN ('cancelling', 'cancelled', 'failed')
        FOR NO KEY UPDATE OF q SKIP LOCKED) q
  WHERE steps.run_id = q.run_id AND steps.seq = q.seq AND steps.state = 'queued'
  RETURNING steps.run_id, steps.seq, name, mode, input::text, input_digest, steps.fence, claim, wait_seq, queue, priority,
    namespace, run_name, attempt),
e AS (INSERT INTO durable.events (run_id, seq, attempt, kind, data)
      SELECT run_id, seq, attempt, 'step_started',
        json_build_object('name', name, 'worker', %(worker)s::text, 'pid', %(pid)s) FROM s)
SELECT run_id, seq, name, mode, input, input_digest, fence, claim, wait_seq, queue, priority, namespace, run_name,
  {sql.DURABLE_COMMIT} FROM s"""


def claim(
    conn: Connection, run_id: UUID, seq: int, *, namespace: str, owner: Owner, token: UUID
) -> ClaimedStep | None:
    """Take a queued step; None when somebody else has it, or it has settled or its run is ending."""
    found = sql.row(
        conn,
        _CLAIM,
        {
            "run": run_id,
            "seq": seq,
            "namespace": namespace,
            "token": token,
            "worker": owner.worker_id,
            "pid": owner.pid,
            "ticks": owner.start_ticks,
        },
    )
    return ClaimedStep(*found[:-1]) if found else None


_OUTCOME = """
WITH old AS (SELECT run_id, seq, claim, owner_worker, owner_pid, owner_ticks, started_at FROM durable.steps
             WHERE run_id = %(run)s AND seq = %(seq)s),
s AS (
  UPDATE durable.steps SET state = %(state)s, output = %(output)s, error = %(final_error)s, claim = NULL,
    owner_worker = NULL, owner_pid = NULL, owner_ticks = NULL, next_wake_at = CASE WHEN %(state)s = 'queued'
      THEN durable.now() + %(grace)s * interval '1 second' END,
    ended_at = CASE WHEN %(state)s IN ('completed', 'failed') THEN durable.now() END
  WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'started' AND fence = %(fence)s AND claim = %(claim)s {same}
  RETURNING wait_seq),
a AS (
  INSERT INTO durable.attempts (run_id, seq, attempt, outcome, begun, error, claim, owner_worker, owner_pid, owner_ticks,
    code_digest, started_at)
  SELECT old.run_id, old.seq, %(attempt)s, %(outcome)s, true, %(error)s, old.claim, old.owner_worker, old.owner_pid,
    old.owner_ticks, %(code)s, old.started_at FROM old, s WHERE %(outcome)s::text IS NOT NULL),
w AS (
  INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, due_at, expires_at)
  SELECT gen_random_uuid(), %(run)s, (SELECT namespace FROM durable.runs WHERE id = %(run)s), %(seq)s, %(wait)s, 'open',
    durable.now() + %(retry_in)s * interval '1 second', durable.now() + %(expires_in)s * interval '1 second'
  FROM s WHERE %(wait)s::text IS NOT NULL),
e AS (
  INSERT INTO durable.events (run_id, seq, attempt, kind, data)
  SELECT %(run)s, %(seq)s, %(attempt)s, %(event)s, json_build_object('name', %(name)s::text)
  FROM s WHERE %(event)s::text IS NOT NULL)
SELECT wait_seq {more} FROM s"""
_SAME = "AND pg_current_xact_id_if_assigned()::text = %(xid)s"


def settle(
    conn: Connection, claim: Claim, step: StepWrite, *, code: str, grace: float, xid: str | None = None,
    idle_ms: int = 10_000,
) -> list[Wake]:
    """Write the outcome of a claimed queued step and count it in; wake-ups to publish after commit.

    Raises:
        FenceLost: the step was taken over, or the transaction is not the one it was begun as. Roll back.
    """
    assert claim.seq is not None  # noqa: S101 - a step's claim
    state, _, _ = runs.lock_any(conn, claim.run_id)
    wait = "retry" if step.retry_in is not None else "doubt" if step.expires_in is not None else None
    found = sql.row(
        conn,
        _OUTCOME.format(same=_SAME if xid else "", more=f", {sql.FROZEN_LIMIT}" if xid else ""),
        {
            "run": claim.run_id,
            "seq": claim.seq,
            "fence": claim.fence,
            "claim": claim.token,
            "state": step.state,
            "output": step.output,
            "error": step.error,
            "final_error": step.error if step.state == "failed" else None,
            "attempt": step.attempt,
            "outcome": step.outcome,
            "code": code,
            "wait": wait,
            "retry_in": step.retry_in,
            "expires_in": step.expires_in,
            "event": step.event,
            "name": step.name,
            "grace": grace,
            "xid": xid,
            "idle_ms": idle_ms,
        },
    )
    if found is None:
        raise FenceLost(f"step {claim.seq} of run {claim.run_id} was taken over; nothing was written")
    if step.state in ("completed", "failed"):
        return runs.count_in(conn, claim.run_id, claim.seq, found[0], grace=grace)
    if state in ("cancelling", "cancelled", "failed"):  # nobody will come for it again
        reject_one(conn, claim.run_id, claim.seq)
        return runs.end_cancelling(conn, claim.run_id, grace=grace)
    return []


def reject_one(conn: Connection, run_id: UUID, seq: int) -> None:
    """Reject a step that is to be tried again in a run that is ending."""
    params = {"run": run_id, "seq": seq}
    sql.run(
        conn,
        "UPDATE durable.steps SET state = 'rejected', ended_at = durable.now(), next_wake_at = NULL"
        " WHERE run_id = %(run)s AND seq = %(seq)s AND state IN ('queued', 'retrying')",
        params,
    )
    sql.run(
        conn,
        "UPDATE durable.waits SET state = 'closed', decided_at = durable.now()"
        " WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'open' AND kind IN ('retry', 'doubt')",
        params,
    )


def release(conn: Connection, claim: Claim, *, grace: float) -> Wake | None:
    """Put a claimed step back on its queue without costing an attempt (an eviction).

    Raises:
        FenceLost: the step was taken over.
    """
    found = sql.row(
        conn,
        """
        UPDATE durable.steps SET state = 'queued', fence = fence + 1, claim = NULL, owner_worker = NULL, owner_pid = NULL,
          owner_ticks = NULL, wake_count = 0, next_wake_at = durable.now() + %(grace)s * interval '1 second'
        WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'started' AND fence = %(fence)s AND claim = %(claim)s
        RETURNING run_id, seq, queue, priority, name""",
        {"run": claim.run_id, "seq": claim.seq, "fence": claim.fence, "claim": claim.token, "grace": grace},
    )
    if found is None:
        raise FenceLost(f"step {claim.seq} of run {claim.run_id} was taken over")
    return Wake(*found)
