"""Verbs of a wait: fire when due, decide, expire. Each is given once, by compare-and-swap.

A decision reads the wait unlocked, locks its run, then compares and swaps in a later statement.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_durable.errors import AlreadyDecided, UnknownWait, VerdictRefused
from celery_durable.ledger import runs, sql
from celery_durable.ledger.rows import Wake, WaitRow

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class AttemptOwner:
    """Who had the attempt a doubt is about: enough to find out whether that process has ended."""

    outcome: str
    ended: bool  # the attempt reported its own end
    worker_id: UUID | None
    pid: int | None
    start_ticks: int | None
    age: float  # seconds since the attempt started


def due(conn: Connection, namespace: str, limit: int) -> list[UUID]:
    """Runs that have timers or retries due; unlocked, a hint."""
    found = sql.rows(
        conn,
        "SELECT run_id FROM durable.waits WHERE state = 'open' AND due_at <= durable.now() AND namespace = %(namespace)s"
        " ORDER BY due_at LIMIT %(limit)s",
        {"namespace": namespace, "limit": limit},
    )
    return list(dict.fromkeys(row[0] for row in found))


def fire(conn: Connection, run_id: UUID, *, grace: float) -> list[Wake]:
    """Answer every due timer and retry of a run; wake-ups to publish after commit."""
    runs.lock_any(conn, run_id)
    fired = sql.rows(
        conn,
        """
        UPDATE durable.waits SET state = 'decided', decided_at = durable.now(), decided_by = 'clock'
        WHERE run_id = %(run)s AND state = 'open' AND due_at <= durable.now() RETURNING seq, kind""",
        {"run": run_id},
    )
    wakes: list[Wake] = []
    for seq, kind in sorted(fired):
        wakes += _timer(conn, run_id, seq, grace) if kind == "timer" else _retry(conn, run_id, seq, grace)
    return wakes


def _timer(conn: Connection, run_id: UUID, seq: int, grace: float) -> list[Wake]:
    found = sql.row(
        conn,
        """
        WITH s AS (UPDATE durable.steps SET state = 'completed', output = 'null', ended_at = durable.now()
                   WHERE run_id = %(run)s AND seq = %(seq)s AND kind = 'sleep' AND state = 'waiting'
                   RETURNING wait_seq),
        e AS (INSERT INTO durable.events (run_id, seq, kind) SELECT %(run)s, %(seq)s, 'timer_fired' FROM s)
        SELECT wait_seq FROM s""",
        {"run": run_id, "seq": seq},
    )
    # seq 0 is a delayed start: it has no step
    return runs.count_in(conn, run_id, seq, found[0] if found else None, grace=grace)


def _retry(conn: Connection, run_id: UUID, seq: int, grace: float) -> list[Wake]:
    return requeue(conn, run_id, seq, grace=grace) or runs.count_in(conn, run_id, seq, None, grace=grace)


def requeue(conn: Connection, run_id: UUID, seq: int, *, grace: float) -> list[Wake]:
    """Put a step that is to be tried again back on its queue; nothing when it is not a queued one."""
    found = sql.row(
        conn,
        """
        UPDATE durable.steps SET state = 'queued', next_wake_at = durable.now() + %(grace)s * interval '1 second',
          wake_count = 0, error = NULL, ended_at = NULL
        WHERE run_id = %(run)s AND seq = %(seq)s AND state IN ('retrying', 'in_doubt') AND wait_seq IS NOT NULL
        RETURNING run_id, seq, queue, priority, name""",
        {"run": run_id, "seq": seq, "grace": grace},
    )
    return [Wake(*found)] if found else []


_LIST = """
SELECT w.id, w.run_id, w.seq, w.kind, w.state, r.name, s.name, s.mode, s.state, s.attempt, s.input::text, w.expires_at,
  w.created_at, w.decided_by, w.decided_at,
  (SELECT a.evidence::text FROM durable.attempts a WHERE a.run_id = w.run_id AND a.seq = w.seq
     AND a.evidence IS NOT NULL ORDER BY a.attempt DESC LIMIT 1)
FROM durable.waits w JOIN durable.runs r ON r.id = w.run_id
LEFT JOIN durable.steps s ON s.run_id = w.run_id AND s.seq = w.seq
WHERE w.namespace = %(namespace)s"""


def inbox(
    conn: Connection, namespace: str, kind: str, *, limit: int = 100, after: UUID | None = None
) -> list[WaitRow]:
    """Open waits of one kind, a page at a time."""
    found = sql.rows(
        conn,
        f"{_LIST} AND w.kind = %(kind)s AND w.state = 'open' AND (%(after)s::uuid IS NULL OR w.id > %(after)s)"
        " ORDER BY w.id LIMIT %(limit)s",
        {"namespace": namespace, "kind": kind, "limit": limit, "after": after},
    )
    return [WaitRow(*row) for row in found]


def find(conn: Connection, namespace: str, wait_id: UUID) -> WaitRow:
    """A wait, open or not.

    Raises:
        UnknownWait: no such wait in this namespace.
    """
    found = sql.row(conn, f"{_LIST} AND w.id = %(id)s", {"namespace": namespace, "id": wait_id})
    if found is None:
        raise UnknownWait(f"no wait {wait_id} in namespace {namespace!r}; `durable doubts` lists the open ones")
    return WaitRow(*found)


def attempt_owner(conn: Connection, run_id: UUID, seq: int) -> AttemptOwner | None:
    """Who had the step's newest begun attempt."""
    found = sql.row(
        conn,
        """
        SELECT outcome, outcome = 'ambiguous', owner_worker, owner_pid, owner_ticks,
          extract(epoch FROM durable.now() - coalesce(started_at, ended_at))::float8
        FROM durable.attempts WHERE run_id = %(run)s AND seq = %(seq)s AND begun ORDER BY attempt DESC LIMIT 1""",
        {"run": run_id, "seq": seq},
    )
    return AttemptOwner(*found) if found else None


def verdict(
    conn: Connection,
    wait: WaitRow,
    *,
    state: str,
    by: str,
    grace: float,
    output: str | None = None,
    error: str | None = None,
    allowed: Callable[[Connection], str | None] = lambda _: None,
) -> list[Wake]:
    """Decide a doubt: `state` is completed, failed or retrying (not executed). Wake-ups to publish after commit.

    `allowed` is asked behind the lock and returns why the verdict must not be taken, or None.

    Raises:
        AlreadyDecided: somebody was first, or it has expired.
        VerdictRefused: what `allowed` said.
    """
    runs.lock_any(conn, wait.run_id)
    refusal = allowed(conn)
    if refusal is not None:
        raise VerdictRefused(refusal)
    decision = {"verdict": {"retrying": "not_executed"}.get(state, state)}
    swapped = sql.row(
        conn,
        """
        UPDATE durable.waits SET state = 'decided', decided_at = durable.now(), decided_by = %(by)s, decision = %(decision)s
        WHERE id = %(id)s AND state = 'open' RETURNING 1""",
        {"id": wait.id, "by": by, "decision": json.dumps(decision)},
    )
    if swapped is None:
        now = sql.row(
            conn, "SELECT state, decided_by, decided_at FROM durable.waits WHERE id = %(id)s", {"id": wait.id}
        )
        told = f"{now[0]} by {now[1] or 'the clock'} at {now[2]:%Y-%m-%d %H:%M:%S %Z}" if now else "gone"
        raise AlreadyDecided(f"wait {wait.id} is {told}")
    if state == "retrying":
        return _not_executed(conn, wait, by, grace)
    return _settle(conn, wait, state, output, error, f"verdict_{state}", by, grace)


def _settle(
    conn: Connection, wait: WaitRow, state: str, output: str | None, error: str | None, event: str, by: str, grace: float
) -> list[Wake]:
    found = sql.row(
        conn,
        """
        WITH s AS (UPDATE durable.steps SET state = %(state)s, output = %(output)s, error = %(error)s, ended_at = durable.now()
                   WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'in_doubt' RETURNING wait_seq),
        e AS (INSERT INTO durable.events (run_id, seq, kind, data)
              SELECT %(run)s, %(seq)s, %(event)s, json_build_object('by', %(by)s::text) FROM s)
        SELECT wait_seq FROM s""",
        {
            "run": wait.run_id,
            "seq": wait.seq,
            "state": state,
            "output": output,
            "error": error,
            "event": event,
            "by": by,
        },
    )
    return runs.count_in(conn, wait.run_id, wait.seq, found[0], grace=grace) if found else []


def _not_executed(conn: Connection, wait: WaitRow, by: str, grace: float) -> list[Wake]:
    params = {"run": wait.run_id, "seq": wait.seq, "by": by}
    sql.run(
        conn,
        """
        WITH a AS (UPDATE durable.attempts SET outcome = 'not_executed' WHERE run_id = %(run)s AND seq = %(seq)s
                     AND begun AND outcome IN ('lost', 'ambiguous') RETURNING 1)
        INSERT INTO durable.events (run_id, seq, kind, data)
        VALUES (%(run)s, %(seq)s, 'verdict_not_executed', json_build_object('by', %(by)s::text))""",
        params,
    )
    wakes = requeue(conn, wait.run_id, wait.seq, grace=grace)
    if wakes:
        return wakes
    sql.run(
        conn,
        "UPDATE durable.steps SET state = 'retrying' WHERE run_id = %(run)s AND seq = %(seq)s AND state = 'in_doubt'",
        params,
    )
    return runs.count_in(conn, wait.run_id, wait.seq, None, grace=grace)


def expired(conn: Connection, namespace: str, limit: int) -> list[UUID]:
    """Waits whose time to live has passed; unlocked, a hint."""
    found = sql.rows(
        conn,
        "SELECT id FROM durable.waits WHERE state = 'open' AND expires_at <= durable.now() AND namespace = %(namespace)s"
        " ORDER BY expires_at LIMIT %(limit)s",
        {"namespace": namespace, "limit": limit},
    )
    return [row[0] for row in found]


def expire(conn: Connection, namespace: str, wait_id: UUID, *, error: str, grace: float) -> list[Wake]:
    """Let a doubt expire: its step fails loudly and is never run again."""
    wait = find(conn, namespace, wait_id)
    runs.lock_any(conn, wait.run_id)
    swapped = sql.row(
        conn,
        """
        UPDATE durable.waits SET state = 'expired', decided_at = durable.now()
        WHERE id = %(id)s AND state = 'open' AND expires_at <= durable.now() RETURNING 1""",
        {"id": wait_id},
    )
    if swapped is None:
        return []
    return _settle(conn, wait, "failed", None, error, "wait_expired", "clock", grace)


def open_code_wait(conn: Connection, run_id: UUID, namespace: str, seq: int) -> None:
    """Open the wait that a run parks on when history and code disagree; once."""
    sql.run(
        conn,
        """
        INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state)
        SELECT gen_random_uuid(), %(run)s, %(namespace)s, %(seq)s, 'code', 'open'
        WHERE NOT EXISTS (SELECT 1 FROM durable.waits WHERE run_id = %(run)s AND seq = %(seq)s AND kind = 'code'
                          AND state = 'open')""",
        {"run": run_id, "namespace": namespace, "seq": seq},
    )

