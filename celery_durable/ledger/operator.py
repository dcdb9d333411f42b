"""Verbs of people: cancel a run, retry a failed one. A named actor, one transaction per run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from celery_durable.errors import WrongState
from celery_durable.ledger import runs, sql
from celery_durable.ledger.rows import Wake
from celery_durable.ledger.states import RunState

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection


def cancel(conn: Connection, run_id: UUID, namespace: str, *, by: str, grace: float) -> tuple[str, list[UUID], list[Wake]]:
    """Cancel one run: its new state, its children to cancel next, and wake-ups to publish after commit.

    Unstarted steps are rejected; while something is in flight the run is `cancelling`. Cancelling twice is
    the same as once.

    Raises:
        WrongState: the run has completed or failed.
        UnknownRun: no such run in this namespace.
    """
    state, _, _ = runs.lock_any(conn, run_id, namespace)
    if state in (RunState.CANCELLED, RunState.CANCELLING):
        return state, _children(conn, run_id), []
    if state in (RunState.COMPLETED, RunState.FAILED):
        raise WrongState(f"run {run_id} has {state}: nothing is left to cancel")
    children = _children(conn, run_id)
    runs.reject_unstarted(conn, run_id)
    params: dict[str, Any] = {"run": run_id, "by": by}
    owned = state == RunState.RUNNING
    unowned = "" if owned else ", fence = fence + 1, next_wake_at = NULL, parked_on = NULL, parked_seq = NULL, error = NULL"
    sql.run(
        conn,
        f"""
        WITH r AS (UPDATE durable.runs SET state = 'cancelling', cancelled_by = %(by)s{unowned} WHERE id = %(run)s RETURNING id),
        w AS (UPDATE durable.waits SET state = 'closed', decided_at = durable.now(), decided_by = %(by)s
              WHERE run_id = %(run)s AND state = 'open')
        INSERT INTO durable.events (run_id, kind, data)
        SELECT id, 'run_cancelling', json_build_object('by', %(by)s::text) FROM r""",
        params,
    )
    wakes = [] if owned else runs.end_cancelling(conn, run_id, grace=grace)
    now = sql.row(conn, "SELECT state FROM durable.runs WHERE id = %(run)s", params)
    return (str(now[0]) if now else state), children, wakes


def _children(conn: Connection, run_id: UUID) -> list[UUID]:
    found = sql.rows(
        conn,
        """
        SELECT s.child_run FROM durable.steps s JOIN durable.runs c ON c.id = s.child_run
        WHERE s.run_id = %(run)s AND s.kind = 'child' AND s.state IN ('waiting', 'rejected') AND c.ended_at IS NULL
        ORDER BY s.child_run""",
        {"run": run_id},
    )
    return [row[0] for row in found]


def retry(conn: Connection, run_id: UUID, namespace: str, *, by: str, grace: float, doubt_ttl: float) -> tuple[list[Wake], list[UUID]]:
    """Reopen a failed run, or wake one parked for code: wake-ups to publish, and failed children to retry.

    The step that failed the run gets a new budget, when nothing was recorded after it. An expired doubt comes
    back as a doubt: it is never run again without a verdict.

    Raises:
        WrongState: the run is in no such state, or steps were recorded after the failed one.
        UnknownRun: no such run in this namespace.
    """
    state, name, _ = runs.lock_any(conn, run_id, namespace)
    params: dict[str, Any] = {"run": run_id, "by": by, "grace": grace, "namespace": namespace}
    now = sql.row(
        conn, "SELECT parked_on, parked_seq, error::text, queue, priority FROM durable.runs WHERE id = %(run)s", params
    )
    assert now is not None  # noqa: S101 - locked above
    if state == RunState.PARKED and now[0] == "code":
        sql.run(
            conn,
            "UPDATE durable.waits SET state = 'decided', decided_at = durable.now(), decided_by = %(by)s"
            " WHERE run_id = %(run)s AND kind = 'code' AND state = 'open'",
            params,
        )
        woken = runs.wake(conn, run_id, now[1], grace=grace, reason=f"retry by {by}")
        return ([woken] if woken else []), []
    if state != RunState.FAILED:
        raise WrongState(f"run {run_id} is {state}: only a failed run, or one parked for code, can be retried")
    failed = _failed_steps(conn, run_id)
    wakes, children = _reopen(conn, run_id, namespace, failed, by=by, grace=grace, doubt_ttl=doubt_ttl)
    sql.run(
        conn,
        """
        WITH r AS (
          UPDATE durable.runs SET state = 'ready', fence = fence + 1, error = NULL, ended_at = NULL, crash_seq = NULL,
            crashes = 0, wake_count = 0, next_wake_at = durable.now() + %(grace)s * interval '1 second'
          WHERE id = %(run)s RETURNING id)
        INSERT INTO durable.events (run_id, kind, data)
        SELECT id, 'run_retried', json_build_object('by', %(by)s::text) FROM r""",
        params,
    )
    return [Wake(run_id, None, now[3], now[4], name), *wakes], children


def _failed_steps(conn: Connection, run_id: UUID) -> list[tuple[Any, ...]]:
    """The failed steps at the end of the history; none when the flow's own code failed."""
    found = sql.rows(
        conn,
        """
        SELECT seq, kind, mode, state, wait_seq, child_run, error::text, attempt FROM durable.steps
        WHERE run_id = %(run)s ORDER BY seq DESC LIMIT 1000""",
        {"run": run_id},
    )
    if not found:
        return []
    last = found[0]
    tail = [row for row in found if row[4] is not None and row[4] == last[4]] or [last]
    return [row for row in tail if row[3] in ("failed", "rejected")]


def _reopen(
    conn: Connection, run_id: UUID, namespace: str, failed: list[tuple[Any, ...]], *, by: str, grace: float, doubt_ttl: float
) -> tuple[list[Wake], list[UUID]]:
    wakes: list[Wake] = []
    children: list[UUID] = []
    reopened = 0
    for seq, kind, mode, _, wait_seq, child, error, attempt in failed:
        params: dict[str, Any] = {"run": run_id, "seq": seq, "grace": grace, "namespace": namespace, "ttl": doubt_ttl}
        sql.run(
            conn, "UPDATE durable.attempts SET forgiven = true WHERE run_id = %(run)s AND seq = %(seq)s", params
        )
        reopened += 1
        if kind == "child":
            state = "waiting"
            children.append(child)
        elif mode == "at_most_once" and error and json.loads(error).get("kind") == "expired":
            state = "in_doubt"
        elif wait_seq is not None:
            state = "queued"
        else:
            state = "retrying"
        back = sql.row(
            conn,
            """
            UPDATE durable.steps SET state = %(state)s, error = NULL, ended_at = NULL, wake_count = 0,
              next_wake_at = CASE WHEN %(state)s = 'queued' THEN durable.now() + %(grace)s * interval '1 second' END
            WHERE run_id = %(run)s AND seq = %(seq)s RETURNING run_id, seq, queue, priority, name""",
            {**params, "state": state},
        )
        if state == "queued" and back is not None:
            wakes.append(Wake(*back))
        if state == "in_doubt":
            sql.run(
                conn,
                "INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, expires_at) VALUES (gen_random_uuid(),"
                " %(run)s, %(namespace)s, %(seq)s, 'doubt', 'open', durable.now() + %(ttl)s * interval '1 second')",
                params,
            )
    wait_seqs = {row[4] for row in failed if row[4] is not None}
    for wait_seq in wait_seqs:  # one: the tail counts into one wait
        params = {"run": run_id, "wait": wait_seq, "namespace": namespace, "pending": reopened}
        sql.run(
            conn,
            "UPDATE durable.steps SET state = 'waiting', output = NULL, ended_at = NULL"
            " WHERE run_id = %(run)s AND seq = %(wait)s AND kind IN ('gather', 'first')",
            params,
        )
        sql.run(
            conn,
            """
            INSERT INTO durable.waits (id, run_id, namespace, seq, kind, state, pending)
            SELECT gen_random_uuid(), %(run)s, %(namespace)s, %(wait)s, kind, 'open', %(pending)s FROM durable.waits
            WHERE run_id = %(run)s AND seq = %(wait)s AND kind IN ('steps', 'first') ORDER BY created_at DESC LIMIT 1""",
            params,
        )
    return wakes, children
