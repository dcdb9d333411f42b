"""Verbs that repair: free what a dead owner held, find owed wake-ups, end what nobody will end.

Who is dead is judged elsewhere; a verb here gets the fence that was judged and changes nothing when it moved.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_durable.ledger import runs, sql
from celery_durable.ledger.rows import Owner, Wake

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Held:
    """A claimed run, or a claimed queued step, with its owner and what the ledger says of the owner's worker."""

    run_id: UUID
    seq: int | None
    fence: int
    owner: Owner
    worker_dead: bool  # lease expired, ended or unknown
    boot_id: str | None
    pid_namespace: int | None


_DEAD = "(w.id IS NULL OR w.ended_at IS NOT NULL OR w.lease_until < clock_timestamp())"
_HELD = f"""
SELECT r.id, NULL::int, r.fence, r.owner_worker, r.owner_pid, r.owner_ticks, {_DEAD}, w.boot_id, w.pid_namespace
FROM durable.runs r LEFT JOIN durable.workers w ON w.id = r.owner_worker
WHERE r.state IN ('running', 'cancelling') AND r.claim IS NOT NULL AND r.namespace = %(namespace)s {{runs}}
UNION ALL
SELECT s.run_id, s.seq, s.fence, s.owner_worker, s.owner_pid, s.owner_ticks, {_DEAD}, w.boot_id, w.pid_namespace
FROM durable.steps s JOIN durable.runs r ON r.id = s.run_id LEFT JOIN durable.workers w ON w.id = s.owner_worker
WHERE s.claim IS NOT NULL AND r.namespace = %(namespace)s {{steps}}"""


def _read(conn: Connection, namespace: str, on_runs: str, on_steps: str, params: dict[str, object]) -> list[Held]:
    found = sql.rows(conn, _HELD.format(runs=on_runs, steps=on_steps), {"namespace": namespace, **params})
    return [Held(r[0], r[1], r[2], Owner(r[3], r[4], r[5]), r[6], r[7], r[8]) for r in found]


def held(conn: Connection, namespace: str) -> list[Held]:
    """Everything that is claimed in a namespace."""
    return _read(conn, namespace, "", "", {})


def held_by(conn: Connection, namespace: str, worker_id: UUID) -> list[Held]:
    """Everything that the processes of one worker hold."""
    return _read(
        conn, namespace, "AND r.owner_worker = %(worker)s", "AND s.owner_worker = %(worker)s", {"worker": worker_id}
    )


def held_run(conn: Connection, namespace: str, run_id: UUID) -> Held | None:
    """One claimed run."""
    found = _read(conn, namespace, "AND r.id = %(run)s", "AND false", {"run": run_id})
    return found[0] if found else None


def held_step(conn: Connection, namespace: str, run_id: UUID, seq: int) -> Held | None:
    """One claimed queued step."""
    found = _read(conn, namespace, "AND false", "AND s.run_id = %(run)s AND s.seq = %(seq)s", {"run": run_id, "seq": seq})
    return found[0] if found else None


_OPEN_STEP = """
SELECT seq, attempt, state, mode FROM durable.steps
WHERE run_id = %(run)s AND wait_seq IS NULL AND kind = 'step' AND state IN ('started', 'retrying')
ORDER BY seq DESC LIMIT 1"""
_LOST = """
INSERT INTO durable.attempts (run_id, seq, attempt, outcome, begun, claim, owner_worker, owner_pid, owner_ticks, code_digest,
  started_at)
SELECT id, %(seq)s, %(attempt)s, 'lost', %(begun)s, claim, owner_worker, owner_pid, owner_ticks, code_digest, claimed_at
FROM durable.runs WHERE id = %(run)s"""


def free(conn: Connection, item: Held, *, max_crashes: int, grace: float, reason: str) -> list[Wake]:
    """Take a run from a dead owner: one lost attempt at its next seq, one crash, and it is ready again.

    At `max_crashes` crashes at one and the same seq the run fails instead. A cancelling run ends. Nothing
    happens when the fence has moved since it was judged, or somebody holds the row.
    """
    if item.seq is not None:
        return free_step(conn, item, max_crashes=max_crashes, grace=grace, reason=reason)
    params: dict[str, object] = {"run": item.run_id, "fence": item.fence}
    locked = sql.row(
        conn,
        f"SELECT state, crash_seq, crashes, queue, priority, name, parent_run, {sql.DURABLE_COMMIT} FROM durable.runs"
        " WHERE id = %(run)s AND fence = %(fence)s AND claim IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED",
        params,
    )
    if locked is None:
        return []
    state, crash_seq, crashes, queue, priority, name, _ = locked[:7]
    opened = sql.row(conn, _OPEN_STEP, params)
    last = sql.row(conn, "SELECT coalesce(max(seq), 0) FROM durable.steps WHERE run_id = %(run)s", params)
    seq = opened[0] if opened else last[0] + 1 if last else 1
    tried = sql.row(
        conn,
        "SELECT coalesce(max(attempt), 0) FROM durable.attempts WHERE run_id = %(run)s AND seq = %(seq)s",
        {**params, "seq": seq},
    )
    begun = bool(opened and opened[2] == "started")
    attempt = opened[1] if opened and begun else 1 + (tried[0] if tried else 0)
    sql.run(conn, _LOST, {**params, "seq": seq, "attempt": attempt, "begun": begun})
    if state == "cancelling":
        return _end_cancelled(conn, item, seq if begun else None, grace)
    crashes = crashes + 1 if crash_seq == seq else 1
    sql.run(
        conn,
        f"""
        WITH r AS (
          UPDATE durable.runs SET state = 'ready', fence = fence + 1, {runs._UNOWNED}, crash_seq = %(seq)s,
            crashes = %(crashes)s, next_wake_at = durable.now() + %(grace)s * interval '1 second', wake_count = 0
          WHERE id = %(run)s RETURNING id)
        INSERT INTO durable.events (run_id, seq, attempt, kind, data)
        SELECT id, %(seq)s, %(attempt)s, 'run_freed', json_build_object('reason', %(reason)s::text, 'crashes', %(crashes)s)
        FROM r""",
        {**params, "seq": seq, "attempt": attempt, "crashes": crashes, "grace": grace, "reason": reason},
    )
    if crashes >= max_crashes:
        fail_ready(
            conn,
            item.run_id,
            json.dumps(
                {
                    "kind": "crashed",
                    "message": f"its process died {crashes} times at step {seq} (durable_max_crashes)",
                    "details": {"seq": seq, "crashes": crashes, "reason": reason},
                }
            ),
        )
        return []
    return [Wake(item.run_id, None, queue, priority, name)]


def fail_ready(conn: Connection, run_id: UUID, error: str) -> None:
    """Fail a locked run that nobody owns."""
    runs._end(
        conn,
        "id = %(run)s AND state = 'ready'",
        {"run": run_id, "state": "failed", "output": None, "error": error, "note": error},
    )
    runs.reject_unstarted(conn, run_id)


def _end_cancelled(conn: Connection, item: Held, begun_seq: int | None, grace: float) -> list[Wake]:
    """End a cancelling run whose owner died; a begun at_most_once step stays visibly in doubt."""
    params = {"run": item.run_id, "seq": begun_seq}
    if begun_seq is not None:
        sql.run(
            conn,
            """
            UPDATE durable.steps SET state = CASE WHEN mode = 'at_most_once' THEN 'in_doubt' ELSE 'rejected' END,
              ended_at = durable.now()
            WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'started' AND claim IS NULL""",
            params,
        )
    sql.run(
        conn, f"UPDATE durable.runs SET fence = fence + 1, {runs._UNOWNED} WHERE id = %(run)s", {"run": item.run_id}
    )
    return runs.end_cancelling(conn, item.run_id, grace=grace)


def free_step(conn: Connection, item: Held, *, max_crashes: int, grace: float, reason: str) -> list[Wake]:
    """Take a queued step from a dead owner: one lost attempt, and back to its queue.

    Whether it may run again, or what became of it must be found out first, is for who claims it next.
    """
    state, _, _ = runs.lock_any(conn, item.run_id)
    params = {"run": item.run_id, "seq": item.seq, "fence": item.fence, "grace": grace, "reason": reason}
    found = sql.row(
        conn,
        """
        WITH old AS (SELECT run_id, seq, attempt, claim, owner_worker, owner_pid, owner_ticks, started_at FROM durable.steps
                     WHERE run_id = %(run)s AND seq = %(seq)s),
        s AS (
          UPDATE durable.steps SET state = 'queued', fence = fence + 1, claim = NULL, owner_worker = NULL, owner_pid = NULL,
            owner_ticks = NULL, wake_count = 0, next_wake_at = durable.now() + %(grace)s * interval '1 second'
          WHERE run_id = %(run)s AND seq = %(seq)s AND fence = %(fence)s AND claim IS NOT NULL
          RETURNING run_id, seq, queue, priority, name, mode, wait_seq),
        a AS (
          INSERT INTO durable.attempts (run_id, seq, attempt, outcome, begun, claim, owner_worker, owner_pid, owner_ticks,
            started_at)
          SELECT old.run_id, old.seq, old.attempt, 'lost', true, old.claim, old.owner_worker, old.owner_pid,
            old.owner_ticks, old.started_at FROM old, s),
        e AS (INSERT INTO durable.events (run_id, seq, attempt, kind, data)
              SELECT s.run_id, s.seq, old.attempt, 'step_freed', json_build_object('reason', %(reason)s::text) FROM old, s)
        SELECT run_id, seq, queue, priority, name, mode, wait_seq FROM s""",
        params,
    )
    if found is None:
        return []
    if state in ("cancelling", "cancelled", "failed"):
        sql.run(
            conn,
            """
            UPDATE durable.steps SET state = CASE WHEN mode = 'at_most_once' THEN 'in_doubt' ELSE 'rejected' END,
              ended_at = durable.now(), next_wake_at = NULL
            WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'queued'""",
            params,
        )
        return runs.end_cancelling(conn, item.run_id, grace=grace)
    lost = sql.row(
        conn,
        "SELECT count(*) FROM durable.attempts WHERE run_id = %(run)s AND seq = %(seq)s AND outcome = 'lost' AND NOT forgiven",
        params,
    )
    if lost and lost[0] >= max_crashes and found[5] != "at_most_once":
        error = json.dumps(
            {
                "kind": "crashed",
                "message": f"its process died {lost[0]} times (durable_max_crashes)",
                "details": {"step": found[4], "seq": found[1]},
            }
        )
        sql.run(
            conn,
            "UPDATE durable.steps SET state = 'failed', error = %(error)s, ended_at = durable.now(), next_wake_at = NULL"
            " WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'queued'",
            {**params, "error": error},
        )
        return runs.count_in(conn, item.run_id, found[1], found[6], grace=grace)
    return [Wake(*found[:5])]


_BACKOFF = "durable.now() + least(%(grace)s * power(2, least(wake_count, 10)), 300) * interval '1 second'"


def owed(conn: Connection, namespace: str, *, grace: float, limit: int) -> list[Wake]:
    """Claim overdue wake-ups of ready runs and queued steps, each moved on with growing backoff before publishing."""
    params = {"namespace": namespace, "grace": grace, "limit": limit}
    found = sql.rows(
        conn,
        f"""
        UPDATE durable.runs SET next_wake_at = {_BACKOFF}, wake_count = wake_count + 1
        WHERE id IN (SELECT id FROM durable.runs WHERE state = 'ready' AND next_wake_at <= durable.now()
                       AND namespace = %(namespace)s
                     ORDER BY next_wake_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED)
          AND state = 'ready'
        RETURNING id, NULL::int, queue, priority, name""",
        params,
    )
    steps = sql.rows(
        conn,
        f"""
        UPDATE durable.steps SET next_wake_at = {_BACKOFF}, wake_count = wake_count + 1
        WHERE (run_id, seq) IN (SELECT s.run_id, s.seq FROM durable.steps s JOIN durable.runs r ON r.id = s.run_id
                                WHERE s.state = 'queued' AND s.next_wake_at <= durable.now()
                                  AND r.namespace = %(namespace)s AND r.state NOT IN ('cancelling', 'cancelled', 'failed')
                                ORDER BY s.next_wake_at LIMIT %(limit)s FOR NO KEY UPDATE OF s SKIP LOCKED)
          AND state = 'queued'
        RETURNING run_id, seq, queue, priority, name""",
        params,
    )
    return [Wake(*row) for row in [*found, *steps]]


def deferred(conn: Connection, run_id: UUID, fence: int, *, grace: float) -> float | None:
    """Leave a ready run whose code this process does not know to others, with a growing delay.

    Returns for how many seconds nobody has known it; None when it has moved on meanwhile.
    """
    found = sql.row(
        conn,
        f"""
        WITH r AS (
          UPDATE durable.runs SET next_wake_at = {_BACKOFF}, wake_count = wake_count + 1,
            unknown_since = coalesce(unknown_since, durable.now())
          WHERE id = %(run)s AND state = 'ready' AND fence = %(fence)s
          RETURNING id, name, extract(epoch FROM durable.now() - unknown_since)::float8 AS age),
        e AS (INSERT INTO durable.events (run_id, kind, data) SELECT id, 'code_unknown', json_build_object('name', name) FROM r)
        SELECT age FROM r""",
        {"run": run_id, "fence": fence, "grace": grace},
    )
    return float(found[0]) if found else None


def park_unknown(conn: Connection, run_id: UUID, fence: int, error: str) -> bool:
    """Park a ready run that no worker has known for too long; its code wait is open already."""
    found = sql.row(
        conn,
        """
        UPDATE durable.runs SET state = 'parked', fence = fence + 1, next_wake_at = NULL, parked_on = 'code',
          parked_seq = 0, error = %(error)s
        WHERE id = %(run)s AND state = 'ready' AND fence = %(fence)s RETURNING 1""",
        {"run": run_id, "fence": fence, "error": error},
    )
    return found is not None


def stuck(conn: Connection, namespace: str, limit: int) -> list[UUID]:
    """Runs parked on steps of which none is pending any more; unlocked, a hint."""
    found = sql.rows(
        conn,
        """
        SELECT r.id FROM durable.runs r
        WHERE r.state = 'parked' AND r.namespace = %(namespace)s AND r.parked_on IN ('steps', 'first', 'timer', 'retry', 'doubt')
          AND NOT EXISTS (SELECT 1 FROM durable.waits w WHERE w.run_id = r.id AND w.seq = r.parked_seq
                            AND w.kind = r.parked_on AND w.state = 'open'
                            AND (w.pending IS NULL OR EXISTS (
                              SELECT 1 FROM durable.steps s WHERE s.run_id = r.id AND s.wait_seq = w.seq
                                AND s.state NOT IN ('completed', 'failed', 'rejected'))))
        LIMIT %(limit)s""",
        {"namespace": namespace, "limit": limit},
    )
    return [row[0] for row in found]


def unstick(conn: Connection, run_id: UUID, *, grace: float) -> list[Wake]:
    """Wake such a run after a second look behind its lock."""
    runs.lock_any(conn, run_id)
    if run_id not in {row[0] for row in sql.rows(conn, _STUCK_ONE, {"run": run_id})}:
        return []
    sql.run(
        conn,
        "UPDATE durable.waits w SET state = 'decided', decided_at = durable.now(), decided_by = 'rescue' FROM durable.runs r"
        " WHERE r.id = %(run)s AND w.run_id = r.id AND w.seq = r.parked_seq AND w.kind = r.parked_on AND w.state = 'open'",
        {"run": run_id},
    )
    seq = sql.row(conn, "SELECT parked_seq FROM durable.runs WHERE id = %(run)s", {"run": run_id})
    woken = runs.wake(conn, run_id, seq[0], grace=grace, reason="rescue") if seq else None
    return [woken] if woken else []


_STUCK_ONE = """
SELECT r.id FROM durable.runs r
WHERE r.id = %(run)s AND r.state = 'parked'
  AND NOT EXISTS (SELECT 1 FROM durable.waits w WHERE w.run_id = r.id AND w.seq = r.parked_seq
                    AND w.kind = r.parked_on AND w.state = 'open'
                    AND (w.pending IS NULL OR EXISTS (
                      SELECT 1 FROM durable.steps s WHERE s.run_id = r.id AND s.wait_seq = w.seq
                        AND s.state NOT IN ('completed', 'failed', 'rejected'))))"""


def untold_children(conn: Connection, namespace: str, limit: int) -> list[UUID]:
    """Children that ended without their parent having been told; unlocked, a hint."""
    found = sql.rows(
        conn,
        """
        SELECT c.id FROM durable.steps s JOIN durable.runs c ON c.id = s.child_run
        WHERE s.kind = 'child' AND s.state = 'waiting' AND c.ended_at IS NOT NULL AND c.namespace = %(namespace)s
        LIMIT %(limit)s""",
        {"namespace": namespace, "limit": limit},
    )
    return [row[0] for row in found]


def orphans(conn: Connection, namespace: str, limit: int) -> list[UUID]:
    """Children that a cancelled parent was waiting for and that have not ended; unlocked, a hint."""
    found = sql.rows(
        conn,
        """
        SELECT c.id FROM durable.steps s JOIN durable.runs c ON c.id = s.child_run JOIN durable.runs p ON p.id = s.run_id
        WHERE s.kind = 'child' AND s.state = 'rejected' AND c.ended_at IS NULL AND c.state <> 'cancelling'
          AND p.state = 'cancelled' AND c.namespace = %(namespace)s LIMIT %(limit)s""",
        {"namespace": namespace, "limit": limit},
    )
    return [row[0] for row in found]


def swept(conn: Connection, namespace: str, name: str, *, by: str, every: float) -> bool:
    """Take this turn of a sweep; False when another has it or it ran less than `every` seconds ago."""
    got = sql.row(
        conn,
        "SELECT pg_try_advisory_xact_lock(hashtext('celery_durable'), hashtext(%(namespace)s || ':' || %(name)s))",
        {"namespace": namespace, "name": name},
    )
    if not got or not got[0]:
        return False
    return (
        sql.row(
            conn,
            """
            INSERT INTO durable.sweeps (namespace, name, last_at, by) VALUES (%(namespace)s, %(name)s, clock_timestamp(), %(by)s)
            ON CONFLICT (namespace, name) DO UPDATE SET last_at = clock_timestamp(), by = %(by)s
            WHERE sweeps.last_at <= clock_timestamp() - %(every)s * interval '1 second' RETURNING 1""",
            {"namespace": namespace, "name": name, "by": by, "every": every},
        )
        is not None
    )
