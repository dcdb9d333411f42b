CREATE TABLE durable.clock (
	"only" BOOLEAN DEFAULT true NOT NULL,
	shift INTERVAL NOT NULL,
	CONSTRAINT pk_clock PRIMARY KEY ("only"),
	CONSTRAINT ck_clock_one_row CHECK (only)
);

CREATE OR REPLACE FUNCTION durable.now() RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT clock_timestamp() + coalesce((SELECT shift FROM durable.clock), interval '0') $$;

CREATE TABLE durable.schema_version (
	"only" BOOLEAN DEFAULT true NOT NULL,
	revision INTEGER NOT NULL,
	CONSTRAINT pk_schema_version PRIMARY KEY ("only"),
	CONSTRAINT ck_schema_version_one_row CHECK (only)
);

CREATE TABLE durable.workers (
	id UUID NOT NULL,
	namespace TEXT NOT NULL,
	hostname TEXT NOT NULL,
	boot_id TEXT NOT NULL,
	pid_namespace BIGINT NOT NULL,
	pid INTEGER NOT NULL,
	start_ticks BIGINT NOT NULL,
	queues JSON NOT NULL,
	started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
	lease_until TIMESTAMP WITH TIME ZONE NOT NULL,
	ended_at TIMESTAMP WITH TIME ZONE,
	CONSTRAINT pk_workers PRIMARY KEY (id)
);

CREATE INDEX ix_workers_alive ON durable.workers (lease_until) WHERE ended_at IS NULL;

CREATE TABLE durable.runs (
	id UUID NOT NULL,
	namespace TEXT NOT NULL,
	name TEXT NOT NULL,
	kind TEXT NOT NULL,
	state TEXT NOT NULL,
	input JSON NOT NULL,
	input_digest TEXT NOT NULL,
	output JSON,
	error JSON,
	queue TEXT,
	priority SMALLINT,
	idempotency_key TEXT,
	parent_run UUID,
	parent_seq INTEGER,
	fence BIGINT DEFAULT 0 NOT NULL,
	claim UUID,
	owner_worker UUID,
	owner_pid INTEGER,
	owner_ticks BIGINT,
	code_digest TEXT,
	next_wake_at TIMESTAMP WITH TIME ZONE,
	wake_count INTEGER DEFAULT 0 NOT NULL,
	parked_on TEXT,
	parked_seq INTEGER,
	crash_seq INTEGER,
	crashes INTEGER DEFAULT 0 NOT NULL,
	cancelled_by TEXT,
	unknown_since TIMESTAMP WITH TIME ZONE,
	created_at TIMESTAMP WITH TIME ZONE DEFAULT durable.now() NOT NULL,
	claimed_at TIMESTAMP WITH TIME ZONE,
	ended_at TIMESTAMP WITH TIME ZONE,
	CONSTRAINT pk_runs PRIMARY KEY (id),
	CONSTRAINT ck_runs_state_known CHECK (state IN ('ready', 'running', 'parked', 'cancelling', 'completed', 'failed', 'cancelled')),
	CONSTRAINT ck_runs_kind_known CHECK (kind IN ('flow', 'step')),
	CONSTRAINT ck_runs_running_has_owner CHECK ((state IN ('running')) <= (claim IS NOT NULL AND owner_worker IS NOT NULL AND owner_pid IS NOT NULL AND owner_ticks IS NOT NULL)),
	CONSTRAINT ck_runs_claim_has_state CHECK ((claim IS NOT NULL) <= (state IN ('running', 'cancelling'))),
	CONSTRAINT ck_runs_parked_names_wait CHECK ((state = 'parked') = (parked_on IS NOT NULL) AND (state = 'parked') = (parked_seq IS NOT NULL)),
	CONSTRAINT ck_runs_ready_owes_wake CHECK ((state = 'ready') <= (next_wake_at IS NOT NULL)),
	CONSTRAINT ck_runs_ended_has_time CHECK ((state IN ('completed', 'failed', 'cancelled')) = (ended_at IS NOT NULL)),
	CONSTRAINT ck_runs_completed_has_output CHECK ((state = 'completed') = (output IS NOT NULL)),
	CONSTRAINT ck_runs_failed_has_error CHECK ((state = 'failed') <= (error IS NOT NULL)),
	CONSTRAINT ck_runs_parent_whole CHECK ((parent_run IS NULL) = (parent_seq IS NULL))
);

CREATE INDEX ix_runs_listed ON durable.runs (namespace, id);

CREATE INDEX ix_runs_parked ON durable.runs (namespace, parked_on, id) WHERE state = 'parked';

CREATE UNIQUE INDEX uq_runs_idempotency_key ON durable.runs (namespace, name, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE INDEX ix_runs_owned ON durable.runs (owner_worker) WHERE state IN ('running', 'cancelling');

CREATE INDEX ix_runs_ready ON durable.runs (next_wake_at) WHERE state = 'ready';

CREATE INDEX ix_runs_parent ON durable.runs (parent_run) WHERE parent_run IS NOT NULL;

CREATE TABLE durable.events (
	id BIGINT GENERATED ALWAYS AS IDENTITY,
	run_id UUID NOT NULL,
	seq INTEGER,
	attempt INTEGER,
	kind TEXT NOT NULL,
	data JSON,
	at TIMESTAMP WITH TIME ZONE DEFAULT durable.now() NOT NULL,
	CONSTRAINT pk_events PRIMARY KEY (id)
);

CREATE INDEX ix_events_run ON durable.events (run_id, id);

CREATE TABLE durable.sweeps (
	name TEXT NOT NULL,
	namespace TEXT NOT NULL,
	last_at TIMESTAMP WITH TIME ZONE NOT NULL,
	by TEXT NOT NULL,
	CONSTRAINT pk_sweeps PRIMARY KEY (namespace, name)
);

CREATE TABLE durable.steps (
	run_id UUID NOT NULL,
	seq INTEGER NOT NULL,
	kind TEXT NOT NULL,
	name TEXT NOT NULL,
	mode TEXT,
	state TEXT NOT NULL,
	attempt INTEGER DEFAULT 1 NOT NULL,
	input JSON,
	input_digest TEXT,
	output JSON,
	error JSON,
	started_at TIMESTAMP WITH TIME ZONE,
	ended_at TIMESTAMP WITH TIME ZONE,
	queue TEXT,
	priority SMALLINT,
	wait_seq INTEGER,
	child_run UUID,
	fence BIGINT DEFAULT 0 NOT NULL,
	claim UUID,
	owner_worker UUID,
	owner_pid INTEGER,
	owner_ticks BIGINT,
	next_wake_at TIMESTAMP WITH TIME ZONE,
	wake_count INTEGER DEFAULT 0 NOT NULL,
	CONSTRAINT pk_steps PRIMARY KEY (run_id, seq),
	CONSTRAINT fk_steps_run_id FOREIGN KEY(run_id) REFERENCES durable.runs (id) ON DELETE CASCADE,
	CONSTRAINT ck_steps_state_known CHECK (state IN ('queued', 'started', 'waiting', 'retrying', 'in_doubt', 'completed', 'failed', 'rejected')),
	CONSTRAINT ck_steps_kind_known CHECK (kind IN ('step', 'child', 'gather', 'first', 'sleep', 'record')),
	CONSTRAINT ck_steps_mode_known CHECK (mode IN ('transactional', 'at_most_once', 'idempotent')),
	CONSTRAINT ck_steps_step_has_mode CHECK ((kind = 'step') = (mode IS NOT NULL)),
	CONSTRAINT ck_steps_attempt_from_one CHECK (attempt >= 1),
	CONSTRAINT ck_steps_queued_tells CHECK ((state = 'queued') <= (wait_seq IS NOT NULL AND next_wake_at IS NOT NULL)),
	CONSTRAINT ck_steps_completed_has_output CHECK ((state = 'completed') = (output IS NOT NULL)),
	CONSTRAINT ck_steps_failed_has_error CHECK ((state = 'failed') <= (error IS NOT NULL)),
	CONSTRAINT ck_steps_claim_has_owner CHECK ((claim IS NOT NULL) = (owner_worker IS NOT NULL)),
	CONSTRAINT ck_steps_claim_has_state CHECK ((claim IS NOT NULL) <= (state = 'started'))
);

CREATE INDEX ix_steps_owned ON durable.steps (owner_worker) WHERE claim IS NOT NULL;

CREATE INDEX ix_steps_queued ON durable.steps (next_wake_at) WHERE state = 'queued';

CREATE UNIQUE INDEX uq_steps_child_run ON durable.steps (child_run) WHERE child_run IS NOT NULL;

CREATE TABLE durable.attempts (
	run_id UUID NOT NULL,
	seq INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	outcome TEXT NOT NULL,
	begun BOOLEAN NOT NULL,
	forgiven BOOLEAN DEFAULT false NOT NULL,
	error JSON,
	evidence JSON,
	claim UUID,
	owner_worker UUID,
	owner_pid INTEGER,
	owner_ticks BIGINT,
	code_digest TEXT,
	started_at TIMESTAMP WITH TIME ZONE,
	ended_at TIMESTAMP WITH TIME ZONE DEFAULT durable.now() NOT NULL,
	CONSTRAINT pk_attempts PRIMARY KEY (run_id, seq, attempt),
	CONSTRAINT fk_attempts_run_id FOREIGN KEY(run_id) REFERENCES durable.runs (id) ON DELETE CASCADE,
	CONSTRAINT ck_attempts_outcome_known CHECK (outcome IN ('failed', 'ambiguous', 'lost', 'not_executed'))
);

CREATE TABLE durable.waits (
	id UUID NOT NULL,
	run_id UUID NOT NULL,
	namespace TEXT NOT NULL,
	seq INTEGER NOT NULL,
	kind TEXT NOT NULL,
	state TEXT NOT NULL,
	pending INTEGER,
	winner INTEGER,
	due_at TIMESTAMP WITH TIME ZONE,
	expires_at TIMESTAMP WITH TIME ZONE,
	decision JSON,
	decided_by TEXT,
	decided_at TIMESTAMP WITH TIME ZONE,
	created_at TIMESTAMP WITH TIME ZONE DEFAULT durable.now() NOT NULL,
	CONSTRAINT pk_waits PRIMARY KEY (id),
	CONSTRAINT fk_waits_run_id FOREIGN KEY(run_id) REFERENCES durable.runs (id) ON DELETE CASCADE,
	CONSTRAINT ck_waits_state_known CHECK (state IN ('open', 'decided', 'expired', 'closed')),
	CONSTRAINT ck_waits_kind_known CHECK (kind IN ('timer', 'retry', 'steps', 'first', 'doubt', 'code')),
	CONSTRAINT ck_waits_branches_counted CHECK ((kind IN ('steps', 'first')) = (pending IS NOT NULL)),
	CONSTRAINT ck_waits_pending_not_negative CHECK (pending >= 0),
	CONSTRAINT ck_waits_timers_due CHECK ((kind IN ('timer', 'retry')) = (due_at IS NOT NULL)),
	CONSTRAINT ck_waits_doubts_expire CHECK ((kind = 'doubt') <= (expires_at IS NOT NULL)),
	CONSTRAINT ck_waits_decided_has_time CHECK ((state = 'open') = (decided_at IS NULL))
);

CREATE INDEX ix_waits_inbox ON durable.waits (namespace, kind, id) WHERE state = 'open';

CREATE INDEX ix_waits_run ON durable.waits (run_id, seq);

CREATE INDEX ix_waits_expiry ON durable.waits (expires_at) WHERE state = 'open' AND expires_at IS NOT NULL;

CREATE INDEX ix_waits_due ON durable.waits (due_at) WHERE state = 'open' AND due_at IS NOT NULL;

CREATE UNIQUE INDEX uq_waits_open ON durable.waits (run_id, seq, kind) WHERE state = 'open';

CREATE TABLE durable.memos (
	run_id UUID NOT NULL,
	seq INTEGER NOT NULL,
	key TEXT NOT NULL,
	value JSON NOT NULL,
	attempt INTEGER NOT NULL,
	CONSTRAINT pk_memos PRIMARY KEY (run_id, seq, key),
	CONSTRAINT fk_memos_run_id FOREIGN KEY(run_id) REFERENCES durable.runs (id) ON DELETE CASCADE
);
