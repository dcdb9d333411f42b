"""Verbs of a run: insert, claim, park, release, finish, free, cancel.

Each is one conditional statement or a few behind the run's row lock; none commits. A verb that finds the
fence moved raises FenceLost and the caller rolls back. Knows no broker: verbs return the wake-ups they owe.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from celery_durable.errors import FenceLost, UnknownRun
from celery_durable.ledger import sql
from celery_durable.ledger.rows import ClaimedRun, NewRun, Owner, Wake
from celery_durable.ledger.states import RunState

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection

    from celery_durable.ledger.rows import Claim

_INSERT = """
WITH r AS (
  INSERT INTO durable.runs (id, namespace, name, kind, state, input, input_digest, queue, priority,
    idempotency_key, parent_run, parent_seq, next_wake_at, parked_on, parked_seq)
  SELECT %(id)s, %(namespace)s, %(name)s, %(kind)s, CASE WHEN d.due IS NULL THEN 'ready' ELSE 'parked' END,
    %(input)s, %(input_digest)s, %(queue)s, %(priority)s, %(idempotency_key)s, %(parent_run)s, %(parent_seq)s,
    CASE WHEN d.due IS NULL THEN durable.now() + %(grace)s * interval '1 second' END,
    CASE WHEN d.due IS NOT NULL THEN 'timer' END, CASE WHEN d.due IS NOT NULL THEN 0 END
  FROM (SELECT coalesce(%(eta)s::timestamptz, durable.now() + %(countdown)s * interval '1 second') AS due) d
  ON CONFLICT (namespace, name, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
  RETURNING id, namespace, state),
w AS (
  INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, due_at)
  SELECT gen_random_uuid(), id, namespace, 0, 'timer', 'open',
    coalesce(%(eta)s::timestamptz, durable.now() + %(countdown)s * interval '1 second')
  FROM r WHERE state = 'parked'),
e AS (INSERT INTO durable.events (run_id, kind) SELECT id, 'run_started' FROM r)
SELECT state FROM r"""


def insert(conn: Connection, new: NewRun, *, grace: float) -> Wake | None:
    """Insert a run, `ready` with its wake-up owed in `grace` seconds, or parked until its eta.

    Returns the wake-up to publish after commit; None when it is parked.

    Raises:
        KeyTaken: its idempotency key has a run; `existing` tells which, in a later statement.
    """
    params = {name: getattr(new, name) for name in NewRun.__slots__}
    found = sql.row(conn, _INSERT, {**params, "grace": grace})
    if found is None:
        raise KeyTaken
    return Wake(new.id, None, new.queue, new.priority, new.name) if found[0] == RunState.READY else None


class KeyTaken(Exception):  # noqa: N818 - not an error: the caller reads the other run
    """A run with this idempotency key exists."""


def existing(conn: Connection, namespace: str, name: str, key: str) -> tuple[UUID, str, str] | None:
    """Id, input digest and stored input of the run that holds an idempotency key."""
    found = sql.row(
        conn,
        "SELECT id, input_digest, input::text FROM durable.runs"
        " WHERE namespace = %(namespace)s AND name = %(name)s AND idempotency_key = %(key)s",
        {"namespace": namespace, "name": name, "key": key},
    )
    return (found[0], found[1], found[2]) if found else None


# SKIP LOCKED: whoever holds the row is claiming, parking or cancelling it; the rescuer repairs the rest.
_CLAIM = f"""
WITH r AS (
  UPDATE durable.runs SET state = 'running', fence = fence + 1, claim = %(token)s, owner_worker = %(worker)s,
    owner_pid = %(pid)s, owner_ticks = %(ticks)s, code_digest = %(code)s, claimed_at = durable.now(),
    next_wake_at = NULL, wake_count = 0, unknown_since = NULL
  WHERE id = (SELECT id FROM durable.runs WHERE id = %(run)s AND namespace = %(namespace)s AND state = 'ready'
              FOR NO KEY UPDATE SKIP LOCKED)
  RETURNING id, name, kind, input::text, input_digest, queue, priority, fence, claim, parent_run, parent_seq,
    created_at),
e AS (INSERT INTO durable.events (run_id, kind, data)
      SELECT id, 'run_claimed', json_build_object('worker', %(worker)s::text, 'pid', %(pid)s, 'fence', fence) FROM r)
SELECT r.*, {sql.DURABLE_COMMIT} FROM r"""


def claim(
    conn: Connection, run_id: UUID, *, namespace: str, owner: Owner, token: UUID, code: str
) -> ClaimedRun | None:
    """Take a ready run; None when somebody else has it, or it is parked or ended."""
    found = sql.row(
        conn,
        _CLAIM,
        {
            "run": run_id,
            "namespace": namespace,
            "token": token,
            "worker": owner.worker_id,
            "pid": owner.pid,
            "ticks": owner.start_ticks,
            "code": code,
        },
    )
    return ClaimedRun(*found[:-1]) if found else None


def judged(conn: Connection, run_id: UUID, namespace: str) -> tuple[str, int, str] | None:
    """State, fence and name of a run, unlocked."""
    found = sql.row(
        conn,
        "SELECT state, fence, name FROM durable.runs WHERE id = %(run)s AND namespace = %(namespace)s",
        {"run": run_id, "namespace": namespace},
    )
    return (found[0], found[1], found[2]) if found else None


_UNOWNED = "claim = NULL, owner_worker = NULL, owner_pid = NULL, owner_ticks = NULL"
_MINE = "id = %(run)s AND fence = %(fence)s AND claim = %(claim)s"


def _mine(claim: Claim) -> dict[str, Any]:
    return {"run": claim.run_id, "fence": claim.fence, "claim": claim.token}


def release(conn: Connection, claim: Claim, *, grace: float, reason: str) -> Wake | None:
    """Hand a running run over: `ready`, its wake-up owed. None when it is being cancelled.

    Raises:
        FenceLost: the claim is gone.
    """
    found = sql.row(
        conn,
        f"""
        WITH r AS (
          UPDATE durable.runs SET state = 'ready', fence = fence + 1, {_UNOWNED}, wake_count = 0,
            next_wake_at = durable.now() + %(grace)s * interval '1 second'
          WHERE {_MINE} AND state = 'running' RETURNING id, queue, priority, name),
        e AS (INSERT INTO durable.events (run_id, kind, data)
              SELECT id, 'run_handed_over', json_build_object('reason', %(reason)s::text) FROM r)
        SELECT id, NULL::int, queue, priority, name FROM r""",
        {**_mine(claim), "grace": grace, "reason": reason},
    )
    if found is None:
        state(conn, claim)
        return None
    return Wake(*found)


def state(conn: Connection, claim: Claim) -> str:
    """State of a claimed run: running or cancelling.

    Raises:
        FenceLost: the claim is gone.
    """
    found = sql.row(conn, f"SELECT state FROM durable.runs WHERE {_MINE}", _mine(claim))
    if found is None:
        raise FenceLost(f"run {claim.run_id} was taken over")
    return str(found[0])


def lock(conn: Connection, claim: Claim) -> str:
    """Lock a claimed run and return its state; what depends on it is read in a later statement.

    Raises:
        FenceLost: the claim is gone.
    """
    found = sql.row(
        conn,
        f"SELECT state, {sql.DURABLE_COMMIT} FROM durable.runs WHERE {_MINE} FOR NO KEY UPDATE",
        _mine(claim),
    )
    if found is None:
        raise FenceLost(f"run {claim.run_id} was taken over")
    return str(found[0])


def park(conn: Connection, claim: Claim, *, seq: int, kind: str, error: str | None = None) -> bool:
    """Park a locked run on its open wait at `seq`; False when that wait has been answered meanwhile.

    The caller locked the run in an earlier statement (`lock`), so that this look at the wait is the second
    one, behind the lock that every answer takes.
    """
    still = sql.row(
        conn,
        "SELECT 1 FROM durable.waits WHERE run_id = %(run)s AND seq = %(seq)s AND kind = %(kind)s AND state = 'open'",
        {"run": claim.run_id, "seq": seq, "kind": kind},
    )
    if still is None:
        return False
    done = sql.row(
        conn,
        f"""
        WITH r AS (
          UPDATE durable.runs SET state = 'parked', fence = fence + 1, {_UNOWNED}, parked_on = %(kind)s,
            parked_seq = %(seq)s, error = %(error)s, crash_seq = NULL, crashes = 0
          WHERE {_MINE} AND state = 'running' RETURNING id),
        e AS (INSERT INTO durable.events (run_id, seq, kind, data)
              SELECT id, %(seq)s, 'run_parked', json_build_object('on', %(kind)s::text) FROM r)
        SELECT id FROM r""",
        {**_mine(claim), "seq": seq, "kind": kind, "error": error},
    )
    if done is None:
        raise FenceLost(f"run {claim.run_id} was taken over")
    return True


def wake(conn: Connection, run_id: UUID, seq: int, *, grace: float, reason: str) -> Wake | None:
    """Make a run ready that is parked on the wait at `seq`; its row is locked by the caller."""
    found = sql.row(
        conn,
        """
        WITH r AS (
          UPDATE durable.runs SET state = 'ready', fence = fence + 1, parked_on = NULL, parked_seq = NULL, error = NULL,
            next_wake_at = durable.now() + %(grace)s * interval '1 second', wake_count = 0, unknown_since = NULL
          WHERE id = %(run)s AND state = 'parked' AND parked_seq = %(seq)s RETURNING id, queue, priority, name),
        e AS (INSERT INTO durable.events (run_id, seq, kind, data)
              SELECT id, %(seq)s, 'run_woken', json_build_object('by', %(reason)s::text) FROM r)
        SELECT id, NULL::int, queue, priority, name FROM r""",
        {"run": run_id, "seq": seq, "grace": grace, "reason": reason},
    )
    return Wake(*found) if found else None


def lock_any(conn: Connection, run_id: UUID, namespace: str | None = None) -> tuple[str, str, int]:
    """Lock a run whoever owns it: state, name, fence.

    Raises:
        UnknownRun: no such run in this namespace.
    """
    found = sql.row(
        conn,
        f"SELECT state, name, fence, {sql.DURABLE_COMMIT} FROM durable.runs WHERE id = %(run)s"
        " AND (%(namespace)s::text IS NULL OR namespace = %(namespace)s) FOR NO KEY UPDATE",
        {"run": run_id, "namespace": namespace},
    )
    if found is None:
        raise UnknownRun(f"no run {run_id} in namespace {namespace!r}")
    return found[0], found[1], found[2]


def _end(conn: Connection, where: str, params: dict[str, Any]) -> bool:
    done = sql.row(
        conn,
        f"""
        WITH r AS (
          UPDATE durable.runs SET state = %(state)s, fence = fence + 1, {_UNOWNED}, output = %(output)s,
            error = %(error)s, ended_at = durable.now(), next_wake_at = NULL, parked_on = NULL, parked_seq = NULL
          WHERE {where} RETURNING id),
        w AS (UPDATE durable.waits SET state = 'closed', decided_at = durable.now() FROM r
              WHERE waits.run_id = r.id AND waits.state = 'open'
                AND (%(state)s <> 'completed' OR waits.kind NOT IN ('retry', 'timer', 'doubt'))),
        e AS (INSERT INTO durable.events (run_id, kind, data)
              SELECT id, 'run_' || %(state)s, %(note)s::json FROM r)
        SELECT id, {sql.DURABLE_COMMIT} FROM r""",
        params,
    )
    return done is not None


def finish(
    conn: Connection,
    claim: Claim,
    *,
    state: RunState,
    output: str | None = None,
    error: str | None = None,
    parent: tuple[UUID, int] | None,
    grace: float,
) -> list[Wake]:
    """End a claimed run and tell its parent, in one transaction; wake-ups to publish after commit.

    A run that is being cancelled ends `cancelled` whatever its code returned, once nothing of it is in flight.

    Raises:
        FenceLost: the claim is gone.
    """
    if parent is not None:  # lower id: a child's is always greater
        sql.row(conn, "SELECT 1 FROM durable.runs WHERE id = %(id)s FOR NO KEY UPDATE", {"id": parent[0]})
    now = lock(conn, claim)
    if now == RunState.CANCELLING:
        state, output, error = RunState.CANCELLED, None, None
        if _in_flight(conn, claim.run_id):
            sql.run(conn, f"UPDATE durable.runs SET fence = fence + 1, {_UNOWNED} WHERE {_MINE}", _mine(claim))
            return []
    params = {**_mine(claim), "state": state, "output": output, "error": error, "note": error if state == "failed" else None}
    if not _end(conn, _MINE, params):
        raise FenceLost(f"run {claim.run_id} was taken over")
    if state != RunState.COMPLETED:
        reject_unstarted(conn, claim.run_id)
    return tell_parent(conn, claim.run_id, parent, state=state, output=output, error=error, grace=grace)


def tell_parent(
    conn: Connection,
    run_id: UUID,
    parent: tuple[UUID, int] | None,
    *,
    state: str,
    output: str | None,
    error: str | None,
    grace: float,
) -> list[Wake]:
    """Settle the parent's step of an ended child; the parent's row is locked by the caller."""
    if parent is None:
        return []
    if state == RunState.CANCELLED:
        error = json.dumps({"kind": "cancelled", "message": f"child run {run_id} was cancelled", "details": {}})
    settled = sql.row(
        conn,
        """
        WITH s AS (
          UPDATE durable.steps SET state = %(state)s, output = %(output)s, error = %(error)s, ended_at = durable.now()
          WHERE run_id = %(parent)s AND seq = %(seq)s AND child_run = %(child)s AND state = 'waiting'
          RETURNING wait_seq),
        e AS (INSERT INTO durable.events (run_id, seq, kind)
              SELECT %(parent)s, %(seq)s, CASE WHEN %(state)s = 'completed' THEN 'step_completed' ELSE 'step_failed' END
              FROM s)
        SELECT wait_seq FROM s""",
        {
            "parent": parent[0],
            "seq": parent[1],
            "child": run_id,
            "state": "completed" if state == RunState.COMPLETED else "failed",
            "output": output,
            "error": error if state != RunState.COMPLETED else None,
        },
    )
    if settled is None:
        return []
    return count_in(conn, parent[0], parent[1], settled[0], grace=grace)


def count_in(conn: Connection, run_id: UUID, seq: int, wait_seq: int | None, *, grace: float) -> list[Wake]:
    """Tell a run, locked by the caller in an earlier statement, that its step `seq` has settled.

    Counts into the wait at `wait_seq` and wakes the run when that is complete; without one, wakes a run that
    is parked on the step itself. Ends a cancelling run when this was the last step in flight.
    """
    woken: Wake | None = None
    if wait_seq is None:
        woken = wake(conn, run_id, seq, grace=grace, reason="step settled")
    else:
        complete = sql.row(
            conn,
            """
            UPDATE durable.waits SET pending = greatest(pending - 1, 0), winner = coalesce(winner, %(seq)s),
              state = CASE WHEN kind = 'first' OR pending <= 1 THEN 'decided' ELSE state END,
              decided_at = CASE WHEN kind = 'first' OR pending <= 1 THEN durable.now() END
            WHERE run_id = %(run)s AND seq = %(wait)s AND kind IN ('steps', 'first') AND state = 'open'
            RETURNING state, winner""",
            {"run": run_id, "seq": seq, "wait": wait_seq},
        )
        if complete is not None and complete[0] == "decided":
            sql.run(
                conn,
                "UPDATE durable.steps SET state = 'completed', output = %(winner)s::text::json, ended_at = durable.now()"
                " WHERE run_id = %(run)s AND seq = %(wait)s AND kind IN ('gather', 'first') AND state = 'waiting'",
                {"run": run_id, "wait": wait_seq, "winner": complete[1]},
            )
            woken = wake(conn, run_id, wait_seq, grace=grace, reason="steps settled")
    wakes = [woken] if woken else []
    return wakes + end_cancelling(conn, run_id, grace=grace)


def _in_flight(conn: Connection, run_id: UUID) -> bool:
    found = sql.row(
        conn,
        "SELECT 1 FROM durable.steps WHERE run_id = %(run)s AND claim IS NOT NULL LIMIT 1",
        {"run": run_id},
    )
    return found is not None


def end_cancelling(conn: Connection, run_id: UUID, *, grace: float) -> list[Wake]:
    """End a locked run that is cancelling, owned by nobody and has nothing in flight."""
    found = sql.row(
        conn,
        "SELECT parent_run, parent_seq FROM durable.runs WHERE id = %(run)s AND state = 'cancelling' AND claim IS NULL",
        {"run": run_id},
    )
    if found is None or _in_flight(conn, run_id):
        return []
    _end(
        conn,
        "id = %(run)s AND state = 'cancelling' AND claim IS NULL",
        {"run": run_id, "state": RunState.CANCELLED, "output": None, "error": None, "note": None},
    )
    # its parent's row comes first in the lock order: told in a transaction of its own (`inform_parent`)
    return []


def inform_parent(conn: Connection, run_id: UUID, *, grace: float) -> list[Wake]:
    """Settle the parent's step of a child that has ended; a transaction of its own, safe to repeat."""
    child = sql.row(
        conn,
        "SELECT parent_run, parent_seq FROM durable.runs WHERE id = %(run)s AND parent_run IS NOT NULL",
        {"run": run_id},
    )
    if child is None:
        return []
    sql.row(conn, "SELECT 1 FROM durable.runs WHERE id = %(id)s FOR NO KEY UPDATE", {"id": child[0]})
    ended = sql.row(
        conn,
        "SELECT state, output::text, error::text FROM durable.runs WHERE id = %(run)s AND ended_at IS NOT NULL",
        {"run": run_id},
    )
    if ended is None:
        return []
    return tell_parent(
        conn, run_id, (child[0], child[1]), state=ended[0], output=ended[1], error=ended[2], grace=grace
    )


def reject_unstarted(conn: Connection, run_id: UUID) -> None:
    """Reject what a run that ends without success has not started; doubts stay visible in their rows."""
    sql.run(
        conn,
        """
        UPDATE durable.steps SET state = 'rejected', ended_at = durable.now(), next_wake_at = NULL
        WHERE run_id = %(run)s AND state IN ('queued', 'waiting', 'retrying')""",
        {"run": run_id},
    )
