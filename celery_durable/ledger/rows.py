"""Rows of the ledger as frozen dataclasses, read by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that claims: its worker's incarnation and its identity on its host."""

    worker_id: UUID
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim on a run, or on a queued step when `seq` is set. Every write checks number and token."""

    run_id: UUID
    fence: int
    token: UUID
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Wake:
    """A wake-up that is owed: published after commit, again by the rescuer if it was lost."""

    run_id: UUID
    seq: int | None = None  # a queued step, else the run itself
    queue: str | None = None
    priority: int | None = None
    name: str = ""  # of the step or flow


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to insert. `input` is stored text; delays are seconds on the ledger's clock."""

    id: UUID
    namespace: str
    name: str
    kind: str
    input: str
    input_digest: str
    queue: str | None = None
    priority: int | None = None
    idempotency_key: str | None = None
    parent_run: UUID | None = None
    parent_seq: int | None = None
    eta: datetime | None = None
    countdown: float | None = None


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """What a continuation needs of the run it claimed."""

    id: UUID
    name: str
    kind: str
    input: str
    input_digest: str
    queue: str | None
    priority: int | None
    fence: int
    claim: UUID
    parent_run: UUID | None
    parent_seq: int | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class StepRow:
    """A recorded step, as replay reads it. Payloads are stored text."""

    seq: int
    kind: str
    name: str
    mode: str | None
    state: str
    attempt: int
    input_digest: str | None
    output: str | None
    error: str | None
    wait_seq: int | None
    child_run: UUID | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt that was not a plain success."""

    seq: int
    attempt: int
    outcome: str
    begun: bool
    forgiven: bool
    code_digest: str | None
    age: float  # seconds since it started, on the ledger's clock


@dataclass(frozen=True, slots=True)
class OpenWait:
    """An open wait of a run."""

    id: UUID
    seq: int
    kind: str
    pending: int | None
    seconds_left: float | None  # until due, on the ledger's clock; None without a deadline


@dataclass(frozen=True, slots=True)
class ClaimedStep:
    """A queued step that a process claimed."""

    run_id: UUID
    seq: int
    name: str
    mode: str
    input: str
    input_digest: str
    fence: int
    claim: UUID
    wait_seq: int
    queue: str | None
    priority: int | None
    namespace: str
    run_name: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as operators and `run.result()` read it. Payloads are stored text."""

    id: UUID
    name: str
    kind: str
    state: str
    input: str
    output: str | None
    error: str | None
    queue: str | None
    priority: int | None
    idempotency_key: str | None
    parent_run: UUID | None
    fence: int
    owner_worker: UUID | None
    owner_pid: int | None
    next_wake_at: datetime | None
    wake_count: int
    parked_on: str | None
    parked_seq: int | None
    crashes: int
    cancelled_by: str | None
    created_at: datetime
    claimed_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class StepDetail:
    """A step as operators read it."""

    seq: int
    kind: str
    name: str
    mode: str | None
    state: str
    attempt: int
    input: str | None
    output: str | None
    error: str | None
    started_at: datetime | None
    ended_at: datetime | None
    queue: str | None
    child_run: UUID | None


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to a run."""

    id: int
    run_id: UUID
    seq: int | None
    attempt: int | None
    kind: str
    data: Any
    at: datetime


@dataclass(frozen=True, slots=True)
class WaitRow:
    """A wait with the step it is about, as the inbox shows it."""

    id: UUID
    run_id: UUID
    seq: int
    kind: str
    state: str
    run_name: str
    step_name: str | None
    step_mode: str | None
    step_state: str | None
    step_attempt: int | None
    step_input: str | None
    expires_at: datetime | None
    created_at: datetime
    decided_by: str | None
    decided_at: datetime | None
    evidence: str | None
