"""The ledger's tables, their CHECKs and partial indexes.

Owns the shape of the schema `durable`; knows nothing of who reads or writes it. Created here
(`METADATA.create_all`) and by the migrations alike: a test compares both catalogs.

Payload columns are `json`, which keeps its bytes; they travel as text (`JsonText`), because only the
codec above may look inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
    cast,
    event,
    text,
)
from sqlalchemy.types import UserDefinedType

from celery_durable.ledger.states import (
    RUN_ENDED,
    AttemptOutcome,
    RunState,
    StepKind,
    StepState,
    WaitKind,
    WaitState,
    quoted,
)

if TYPE_CHECKING:
    from sqlalchemy.sql import ColumnElement

SCHEMA = "durable"


class JsonText(UserDefinedType[str]):
    """A `json` column that is written and read as its text."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"

    def bind_expression(self, bindvalue: Any) -> ColumnElement[str]:
        return cast(bindvalue, JsonPlain)

    def column_expression(self, colexpr: Any) -> ColumnElement[str]:
        return cast(colexpr, Text)


class JsonPlain(UserDefinedType[str]):
    """The bare type, for the cast that JsonText makes."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSON"


METADATA = MetaData(
    schema=SCHEMA,
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    },
)

Moment = DateTime(timezone=True)
SHIFTED_NOW = text("durable.now()")

CLOCK_FUNCTION = """\
CREATE OR REPLACE FUNCTION durable.now() RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT clock_timestamp() + coalesce((SELECT shift FROM durable.clock), interval '0') $$"""


def _one_of(column: str, *states: Any) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({quoted(*states)})", name=f"{column}_known")


# The test clock. Empty in production; one row that the testing kit moves.
clock = Table(
    "clock",
    METADATA,
    Column("only", Boolean, primary_key=True, server_default=text("true")),
    Column("shift", Interval, nullable=False),
    CheckConstraint("only", name="one_row"),
)

# One row: the schema's own revision, read at start (`ledger.schema_version`).
version = Table(
    "schema_version",
    METADATA,
    Column("only", Boolean, primary_key=True, server_default=text("true")),
    Column("revision", Integer, nullable=False),
    CheckConstraint("only", name="one_row"),
)

# One row per worker incarnation; never locked together with any other table's rows.
workers = Table(
    "workers",
    METADATA,
    Column("id", Uuid, primary_key=True),
    Column("namespace", Text, nullable=False),
    Column("hostname", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid_namespace", BigInteger, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("start_ticks", BigInteger, nullable=False),
    Column("queues", JsonText, nullable=False),
    Column("started_at", Moment, nullable=False, server_default=text("clock_timestamp()")),
    Column("lease_until", Moment, nullable=False),  # on the unshifted clock
    Column("ended_at", Moment),  # set by the worker's keeper when the last process is gone
    Index("ix_workers_alive", "lease_until", postgresql_where=text("ended_at IS NULL")),
)

runs = Table(
    "runs",
    METADATA,
    Column("id", Uuid, primary_key=True),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("input", JsonText, nullable=False),
    Column("input_digest", Text, nullable=False),
    Column("output", JsonText),
    Column("error", JsonText),
    Column("queue", Text),  # None: the app's durable queue
    Column("priority", SmallInteger),
    Column("idempotency_key", Text),
    Column("parent_run", Uuid),
    Column("parent_seq", Integer),
    # the fence: both are checked by every write
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("claim", Uuid),
    Column("owner_worker", Uuid),
    Column("owner_pid", Integer),
    Column("owner_ticks", BigInteger),
    Column("code_digest", Text),  # of the last claim
    # the owed wake-up
    Column("next_wake_at", Moment),
    Column("wake_count", Integer, nullable=False, server_default=text("0")),
    # what a parked run waits for: the wait at this seq
    Column("parked_on", Text),
    Column("parked_seq", Integer),
    # crashes at one and the same next seq
    Column("crash_seq", Integer),
    Column("crashes", Integer, nullable=False, server_default=text("0")),
    Column("cancelled_by", Text),
    Column("unknown_since", Moment),  # first worker that had no code for it
    Column("created_at", Moment, nullable=False, server_default=SHIFTED_NOW),
    Column("claimed_at", Moment),
    Column("ended_at", Moment),
    _one_of("state", *RunState),
    CheckConstraint("kind IN ('flow', 'step')", name="kind_known"),
    CheckConstraint(
        f"(state IN ({quoted(RunState.RUNNING)})) <= (claim IS NOT NULL AND owner_worker IS NOT NULL"
        " AND owner_pid IS NOT NULL AND owner_ticks IS NOT NULL)",
        name="running_has_owner",
    ),
    CheckConstraint(
        f"(claim IS NOT NULL) <= (state IN ({quoted(RunState.RUNNING, RunState.CANCELLING)}))",
        name="claim_has_state",
    ),
    CheckConstraint(
        f"(state = 'parked') = (parked_on IS NOT NULL) AND (state = 'parked') = (parked_seq IS NOT NULL)",
        name="parked_names_wait",
    ),
    CheckConstraint("(state = 'ready') <= (next_wake_at IS NOT NULL)", name="ready_owes_wake"),
    CheckConstraint(f"(state IN ({quoted(*RUN_ENDED)})) = (ended_at IS NOT NULL)", name="ended_has_time"),
    CheckConstraint("(state = 'completed') = (output IS NOT NULL)", name="completed_has_output"),
    CheckConstraint("(state = 'failed') <= (error IS NOT NULL)", name="failed_has_error"),
    CheckConstraint("(parent_run IS NULL) = (parent_seq IS NULL)", name="parent_whole"),
    # one run per key, for idempotent starts
    Index(
        "uq_runs_idempotency_key",
        "namespace",
        "name",
        "idempotency_key",
        unique=True,
        postgresql_where=text("idempotency_key IS NOT NULL"),
    ),
    Index("ix_runs_ready", "next_wake_at", postgresql_where=text("state = 'ready'")),
    Index(
        "ix_runs_owned",
        "owner_worker",
        postgresql_where=text("state IN ('running', 'cancelling')"),
    ),
    Index("ix_runs_parked", "namespace", "parked_on", "id", postgresql_where=text("state = 'parked'")),
    Index("ix_runs_parent", "parent_run", postgresql_where=text("parent_run IS NOT NULL")),
    Index("ix_runs_listed", "namespace", "id"),
)

steps = Table(
    "steps",
    METADATA,
    Column("run_id", Uuid, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("mode", Text),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default=text("1")),
    Column("input", JsonText),
    Column("input_digest", Text),
    Column("output", JsonText),
    Column("error", JsonText),
    Column("started_at", Moment),
    Column("ended_at", Moment),
    # a queued step: where it goes, who has it, whom it tells
    Column("queue", Text),
    Column("priority", SmallInteger),
    Column("wait_seq", Integer),  # seq of the wait it counts into
    Column("child_run", Uuid),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("claim", Uuid),
    Column("owner_worker", Uuid),
    Column("owner_pid", Integer),
    Column("owner_ticks", BigInteger),
    Column("next_wake_at", Moment),
    Column("wake_count", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("run_id", "seq"),
    ForeignKeyConstraint(["run_id"], ["durable.runs.id"], ondelete="CASCADE"),
    _one_of("state", *StepState),
    _one_of("kind", *StepKind),
    CheckConstraint("mode IN ('transactional', 'at_most_once', 'idempotent')", name="mode_known"),
    CheckConstraint("(kind = 'step') = (mode IS NOT NULL)", name="step_has_mode"),
    CheckConstraint("attempt >= 1", name="attempt_from_one"),
    CheckConstraint("(state = 'queued') <= (wait_seq IS NOT NULL AND next_wake_at IS NOT NULL)", name="queued_tells"),
    CheckConstraint("(state = 'completed') = (output IS NOT NULL)", name="completed_has_output"),
    CheckConstraint("(state = 'failed') <= (error IS NOT NULL)", name="failed_has_error"),
    CheckConstraint("(claim IS NOT NULL) = (owner_worker IS NOT NULL)", name="claim_has_owner"),
    CheckConstraint("(claim IS NOT NULL) <= (state = 'started')", name="claim_has_state"),
    Index("ix_steps_queued", "next_wake_at", postgresql_where=text("state = 'queued'")),
    Index("ix_steps_owned", "owner_worker", postgresql_where=text("claim IS NOT NULL")),
    Index("uq_steps_child_run", "child_run", unique=True, postgresql_where=text("child_run IS NOT NULL")),
)

# Attempts that were not a plain success at the first try.
attempts = Table(
    "attempts",
    METADATA,
    Column("run_id", Uuid, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("begun", Boolean, nullable=False),  # False: lost before an intent was written
    Column("forgiven", Boolean, nullable=False, server_default=text("false")),  # `retry` gave a new budget
    Column("error", JsonText),
    Column("evidence", JsonText),  # what the old process reported after it had lost its claim
    Column("claim", Uuid),
    Column("owner_worker", Uuid),
    Column("owner_pid", Integer),
    Column("owner_ticks", BigInteger),
    Column("code_digest", Text),
    Column("started_at", Moment),
    Column("ended_at", Moment, nullable=False, server_default=SHIFTED_NOW),
    PrimaryKeyConstraint("run_id", "seq", "attempt"),
    ForeignKeyConstraint(["run_id"], ["durable.runs.id"], ondelete="CASCADE"),
    _one_of("outcome", *AttemptOutcome),
)

waits = Table(
    "waits",
    METADATA,
    Column("id", Uuid, primary_key=True),
    Column("run_id", Uuid, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("pending", Integer),  # branches that have not settled
    Column("winner", Integer),  # seq of the branch that settled first
    Column("due_at", Moment),
    Column("expires_at", Moment),
    Column("decision", JsonText),
    Column("decided_by", Text),
    Column("decided_at", Moment),
    Column("created_at", Moment, nullable=False, server_default=SHIFTED_NOW),
    ForeignKeyConstraint(["run_id"], ["durable.runs.id"], ondelete="CASCADE"),
    _one_of("state", *WaitState),
    _one_of("kind", *WaitKind),
    CheckConstraint("(kind IN ('steps', 'first')) = (pending IS NOT NULL)", name="branches_counted"),
    CheckConstraint("pending >= 0", name="pending_not_negative"),
    CheckConstraint("(kind IN ('timer', 'retry')) = (due_at IS NOT NULL)", name="timers_due"),
    CheckConstraint("(kind = 'doubt') <= (expires_at IS NOT NULL)", name="doubts_expire"),
    CheckConstraint("(state = 'open') = (decided_at IS NULL)", name="decided_has_time"),
    Index(
        "uq_waits_open",
        "run_id",
        "seq",
        "kind",
        unique=True,
        postgresql_where=text("state = 'open'"),
    ),
    Index("ix_waits_run", "run_id", "seq"),
    Index("ix_waits_due", "due_at", postgresql_where=text("state = 'open' AND due_at IS NOT NULL")),
    Index("ix_waits_expiry", "expires_at", postgresql_where=text("state = 'open' AND expires_at IS NOT NULL")),
    Index("ix_waits_inbox", "namespace", "kind", "id", postgresql_where=text("state = 'open'")),
)

# Values a step asked to keep across its attempts (`ctx.remember`).
memos = Table(
    "memos",
    METADATA,
    Column("run_id", Uuid, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("value", JsonText, nullable=False),
    Column("attempt", Integer, nullable=False),
    PrimaryKeyConstraint("run_id", "seq", "key"),
    ForeignKeyConstraint(["run_id"], ["durable.runs.id"], ondelete="CASCADE"),
)

# What happened, written with the change it tells.
events = Table(
    "events",
    METADATA,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("run_id", Uuid, nullable=False),
    Column("seq", Integer),
    Column("attempt", Integer),
    Column("kind", Text, nullable=False),
    Column("data", JsonText),
    Column("at", Moment, nullable=False, server_default=SHIFTED_NOW),
    Index("ix_events_run", "run_id", "id"),
)

# When each sweep ran last, so that a dead beat is seen and a keeper can stand in.
sweeps = Table(
    "sweeps",
    METADATA,
    Column("name", Text, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("last_at", Moment, nullable=False),  # on the unshifted clock
    Column("by", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "name"),
)

event.listen(METADATA, "before_create", DDL(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
event.listen(clock, "after_create", DDL(CLOCK_FUNCTION.replace("%", "%%")))
