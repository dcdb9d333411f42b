"""Verbs of a step performed in the process that owns its run: intent, outcome, branches.

The hot path. Every write is one statement that locks the run's row behind its fence, does not update it, and
carries its event along. A statement that finds the fence moved writes nothing and raises FenceLost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from celery_durable.errors import FenceLost
from celery_durable.ledger import sql

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from celery_durable.ledger.rows import Claim


@dataclass(slots=True)
class StepWrite:
    """One change of a step's row, with what rides along.

    `was` is the state the row must be in, None to insert it. `took` is how long ago the attempt started, in
    seconds. `retry_in` and `expires_in` (seconds) open a retry or a doubt wait. `lost_reason` is for humans.
    """

    seq: int
    kind: str
    name: str
    state: str
    event: str | None
    mode: str | None = None
    was: str | None = None
    attempt: int = 1
    input: str | None = None
    input_digest: str | None = None
    output: str | None = None
    error: str | None = None
    took: float = 0.0
    outcome: str | None = None  # an attempts row, when not a plain success
    retry_in: float | None = None
    expires_in: float | None = None
    child_run: UUID | None = None


@lru_cache(maxsize=256)
def _statement(
    *, insert: bool, intent: bool, ended: bool, attempt: bool, wait: bool, told: bool, in_transaction: bool
) -> str:
    """The statement for one shape of StepWrite: built once per shape."""
    states = "state = 'running'" if intent else "state IN ('running', 'cancelling')"
    same = " AND pg_current_xact_id_if_assigned()::text = %(xid)s" if in_transaction else ""
    parts = [
        "r AS (SELECT id, state, namespace, claim, owner_worker, owner_pid, owner_ticks, code_digest,"
        " durable.now() AS now FROM durable.runs"
        f" WHERE id = %(run)s AND {states} AND fence = %(fence)s AND claim = %(claim)s{same} FOR NO KEY UPDATE)"
    ]
    end = "r.now" if ended else "NULL::timestamptz"
    if insert:
        parts.append(
            "s AS (INSERT INTO durable.steps (run_id, seq, kind, name, mode, state, attempt, input, input_digest,"
            " output, error, started_at, ended_at, child_run)"
            " SELECT id, %(seq)s, %(kind)s, %(name)s, %(mode)s, %(state)s, %(attempt)s, %(input)s, %(input_digest)s,"
            f" %(output)s, %(error)s, r.now - %(took)s * interval '1 second', {end}, %(child_run)s FROM r RETURNING 1)"
        )
    else:
        parts.append(
            "s AS (UPDATE durable.steps SET state = %(state)s, attempt = %(attempt)s, output = %(output)s,"
            f" error = %(error)s, started_at = r.now - %(took)s * interval '1 second', ended_at = {end}"
            " FROM r WHERE run_id = r.id AND seq = %(seq)s AND steps.state = %(was)s"
            " AND attempt <= %(attempt)s AND steps.claim IS NULL RETURNING 1)"
        )
    if attempt:
        parts.append(
            "a AS (INSERT INTO durable.attempts (run_id, seq, attempt, outcome, begun, error, claim, owner_worker,"
            " owner_pid, owner_ticks, code_digest, started_at)"
            " SELECT id, %(seq)s, %(attempt)s, %(outcome)s, true, %(attempt_error)s, r.claim, owner_worker, owner_pid,"
            " owner_ticks, code_digest, r.now - %(took)s * interval '1 second' FROM r, s)"
        )
    if wait:
        parts.append(
            "w AS (INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, due_at, expires_at)"
            " SELECT gen_random_uuid(), id, namespace, %(seq)s, %(wait)s, 'open',"
            " r.now + %(retry_in)s * interval '1 second', r.now + %(expires_in)s * interval '1 second' FROM r, s)"
        )
    if told:
        parts.append(
            "e AS (INSERT INTO durable.events (run_id, seq, attempt, kind, data, at)"
            " SELECT id, %(seq)s, %(attempt)s, %(event)s, json_build_object('name', %(name)s::text), r.now FROM r, s)"
        )
    more = f", {sql.FROZEN_LIMIT}" if in_transaction else ""
    return f"WITH {', '.join(parts)} SELECT state, {sql.DURABLE_COMMIT}{more} FROM r, s"


def write(conn: Connection, claim: Claim, step: StepWrite, *, xid: str | None = None, idle_ms: int = 10_000) -> str:
    """Write one step's change behind the run's fence; the run's state (running or cancelling).

    With `xid`, also requires that the transaction is still the one it was begun as.

    Raises:
        FenceLost: the claim is gone, the row is not as expected, or the transaction is another. Roll back.
    """
    wait = "retry" if step.retry_in is not None else "doubt" if step.expires_in is not None else None
    intent = step.state == "started"
    statement = _statement(
        insert=step.was is None,
        intent=intent,
        ended=step.state in ("completed", "failed"),
        attempt=step.outcome is not None,
        wait=wait is not None,
        told=step.event is not None,
        in_transaction=xid is not None,
    )
    params: dict[str, Any] = {
        "run": claim.run_id,
        "fence": claim.fence,
        "claim": claim.token,
        "seq": step.seq,
        "kind": step.kind,
        "name": step.name,
        "mode": step.mode,
        "state": step.state,
        "was": step.was,
        "attempt": step.attempt,
        "input": step.input,
        "input_digest": step.input_digest,
        "output": step.output,
        "error": step.error if step.state == "failed" else None,
        "attempt_error": step.error,
        "took": step.took,
        "outcome": step.outcome,
        "wait": wait,
        "retry_in": step.retry_in,
        "expires_in": step.expires_in,
        "child_run": step.child_run,
        "event": step.event,
        "xid": xid,
        "idle_ms": idle_ms,
    }
    found = sql.row(conn, statement, params)
    if found is None:
        raise FenceLost(f"step {step.seq} of run {claim.run_id}: the run was taken over; nothing was written")
    return str(found[0])


def transaction_id(conn: Connection) -> str:
    """Assign and return the id of the transaction just begun."""
    found = sql.row(conn, "SELECT pg_current_xact_id()::text", {})
    assert found is not None  # noqa: S101 - the statement always has one row
    return str(found[0])


def transaction_status(conn: Connection, xid: str) -> str | None:
    """Fate of a transaction that has ended: committed or aborted; None when too old."""
    found = sql.row(conn, "SELECT pg_xact_status(%(xid)s::xid8)", {"xid": xid})
    return found[0] if found else None


def recorded(conn: Connection, claim: Claim, seq: int) -> tuple[str, int] | None:
    """After an exception at COMMIT: state and attempt of the step, read behind the run's lock.

    Raises:
        FenceLost: the claim is gone.
    """
    sql_lock = "SELECT 1 FROM durable.runs WHERE id = %(run)s AND fence = %(fence)s AND claim = %(claim)s FOR NO KEY UPDATE"
    params = {"run": claim.run_id, "fence": claim.fence, "claim": claim.token, "seq": seq}
    if sql.row(conn, sql_lock, params) is None:
        raise FenceLost(f"run {claim.run_id} was taken over")
    found = sql.row(conn, "SELECT state, attempt FROM durable.steps WHERE run_id = %(run)s AND seq = %(seq)s", params)
    return (found[0], found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Branch:
    """A row to insert behind the run's lock: a queued step, a child run's step, a timer, a gather."""

    seq: int
    kind: str
    name: str
    state: str
    mode: str | None = None
    input: str | None = None
    input_digest: str | None = None
    queue: str | None = None
    priority: int | None = None
    wait_seq: int | None = None
    child_run: UUID | None = None
    output: str | None = None
    due_in: float | None = None  # seconds, for a timer


_BRANCH = """
WITH s AS (
  INSERT INTO durable.steps (run_id, seq, kind, name, mode, state, input, input_digest, queue, priority, wait_seq,
    child_run, output, next_wake_at, started_at, ended_at, attempt)
  VALUES (%(run)s, %(seq)s, %(kind)s, %(name)s, %(mode)s, %(state)s, %(input)s, %(input_digest)s, %(queue)s,
    %(priority)s, %(wait_seq)s, %(child_run)s, %(output)s,
    CASE WHEN %(state)s = 'queued' THEN durable.now() + %(grace)s * interval '1 second' END, durable.now(),
    CASE WHEN %(state)s = 'completed' THEN durable.now() END, %(attempt)s) RETURNING 1),
w AS (
  INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, due_at)
  SELECT gen_random_uuid(), %(run)s, %(namespace)s, %(seq)s, 'timer', 'open',
    durable.now() + %(due_in)s * interval '1 second' FROM s WHERE %(due_in)s::float8 IS NOT NULL),
e AS (
  INSERT INTO durable.events (run_id, seq, kind, data)
  SELECT %(run)s, %(seq)s, 'step_' || %(state)s, json_build_object('name', %(name)s::text) FROM s)
SELECT 1"""

_WAIT = """
INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, pending)
VALUES (gen_random_uuid(), %(run)s, %(namespace)s, %(seq)s, %(kind)s, 'open', %(pending)s)"""


def branch(
    conn: Connection, claim: Claim, namespace: str, branches: Sequence[Branch], *, wait: tuple[int, str, int] | None,
    grace: float,
) -> None:
    """Insert branches of a run that `runs.lock` has locked, and the wait (seq, kind, pending) they count into."""
    below = sql.driver(conn)
    params = [
        {
            "run": claim.run_id,
            "namespace": namespace,
            "grace": grace,
            "attempt": 1,
            **{name: getattr(b, name) for name in Branch.__slots__},
        }
        for b in branches
    ]
    with below.cursor() as cursor:
        cursor.executemany(_BRANCH, params)  # one pipeline
    if wait is not None:
        seq, kind, pending = wait
        sql.run(
            conn,
            _WAIT,
            {"run": claim.run_id, "namespace": namespace, "seq": seq, "kind": kind, "pending": pending},
        )


_REMEMBER = """
WITH r AS (SELECT id FROM durable.runs WHERE id = %(run)s AND {fence} FOR NO KEY UPDATE),
m AS (INSERT INTO durable.memos (run_id, seq, key, value, attempt)
      SELECT id, %(seq)s, %(key)s, %(value)s, %(attempt)s FROM r
      ON CONFLICT (run_id, seq, key) DO NOTHING RETURNING value)
SELECT (SELECT value::text FROM m), {commit} FROM r"""

_RUN_FENCE = "state IN ('running', 'cancelling') AND fence = %(fence)s AND claim = %(claim)s"
_STEP_FENCE = (
    "EXISTS (SELECT 1 FROM durable.steps WHERE run_id = %(run)s AND seq = %(seq)s"
    " AND fence = %(fence)s AND claim = %(claim)s AND state = 'started')"
)


def remember(conn: Connection, claim: Claim, seq: int, attempt: int, key: str, value: str) -> str:
    """Keep a value, or return the one kept first (stored text). Its own commit, behind the fence.

    Raises:
        FenceLost: the claim is gone.
    """
    params = {
        "run": claim.run_id,
        "fence": claim.fence,
        "claim": claim.token,
        "seq": seq,
        "attempt": attempt,
        "key": key,
        "value": value,
    }
    fence = _RUN_FENCE if claim.seq is None else _STEP_FENCE
    found = sql.row(conn, _REMEMBER.format(fence=fence, commit=sql.DURABLE_COMMIT), params)
    if found is None:
        raise FenceLost(f"run {claim.run_id} was taken over")
    if found[0] is not None:
        return str(found[0])
    kept = sql.row(
        conn, "SELECT value::text FROM durable.memos WHERE run_id = %(run)s AND seq = %(seq)s AND key = %(key)s", params
    )
    assert kept is not None  # noqa: S101 - the insert above ran into it
    return str(kept[0])


def still_mine(conn: Connection, claim: Claim) -> bool:
    """Whether a claim on a run or a queued step still holds; a hint, not a lock."""
    params = {"run": claim.run_id, "fence": claim.fence, "claim": claim.token, "seq": claim.seq}
    if claim.seq is None:
        return sql.row(conn, f"SELECT 1 FROM durable.runs WHERE id = %(run)s AND {_RUN_FENCE}", params) is not None
    return sql.row(conn, f"SELECT 1 WHERE {_STEP_FENCE}", params) is not None


def keep_evidence(conn: Connection, claim: Claim, seq: int, attempt: int, evidence: str) -> bool:
    """Keep what an old process reports after it lost its claim beside the doubt; shown, never applied."""
    done = sql.run(
        conn,
        """
        UPDATE durable.attempts SET evidence = %(evidence)s
        WHERE run_id = %(run)s AND seq = %(seq)s AND attempt = %(attempt)s AND claim = %(claim)s AND evidence IS NULL""",
        {"run": claim.run_id, "seq": seq, "attempt": attempt, "claim": claim.token, "evidence": evidence},
    )
    return done > 0
