"""Every error of celery_durable, split by what a caller can do about it.

    DurableError
    ├── TryAgain                 the same call may succeed later
    │   ├── LedgerUnavailable        Postgres is down, read-only, or refused the connection
    │   └── ResultTimeout            the run did not end in time; it goes on
    ├── FixIt                    code, configuration or arguments must change
    │   ├── ConfigurationError       a setting, or the way a worker was started
    │   │   ├── EagerModeError       task_always_eager would run a continuation in the caller
    │   │   └── SchemaMismatch       the ledger's tables are missing, too old or too new
    │   ├── DefinitionError          a step or flow that cannot be declared like this
    │   ├── UnknownDefinition        a name that this process has no code for
    │   ├── UnknownRun               no run with this id in this app's namespace
    │   ├── UnknownWait              no wait (doubt, …) with this id
    │   ├── NotInRun                 a step or a verb of `flow` was called outside a run
    │   ├── NotAllowedHere           the call is not possible from this place in a run
    │   ├── NondeterminismError      the code asked for another step than history holds
    │   ├── IdempotencyConflict      a key was used again with other content
    │   └── PayloadError             a value cannot be stored
    │       ├── ArgumentError            arguments do not fit the signature (also a TypeError)
    │       ├── NotSerializable          the value does not survive encoding
    │       └── PayloadTooLarge          over durable_payload_limit
    ├── AskAPerson               somebody has decided, or has to
    │   ├── AlreadyDecided           a second verdict on the same wait
    │   ├── VerdictRefused           "not executed" cannot be known yet; needs force=True
    │   └── WrongState               the run or wait is not in a state that allows the verb
    └── Ended                    how a step or a run ended, raised where its result was wanted
        ├── StepFailed               a step failed for good
        ├── GatherFailed             one or more branches of a gather failed
        ├── RunFailed                the run failed
        └── RunCancelled             the run was cancelled

Control signals are BaseExceptions, so that a flow's `except Exception` cannot swallow them; only the
engine's outermost loop catches them.
"""

from __future__ import annotations

from typing import Any


class DurableError(Exception):
    """Base of everything celery_durable raises on purpose."""


class TryAgain(DurableError):
    """The same call may succeed later; nothing was lost."""


class LedgerUnavailable(TryAgain):
    """The ledger's Postgres cannot be reached or refuses writes."""


class ResultTimeout(TryAgain, TimeoutError):
    """`run.result(timeout=)` elapsed before the run ended. The run goes on."""


class FixIt(DurableError):
    """Code, configuration or arguments must change before this can succeed."""


class ConfigurationError(FixIt):
    """A setting is missing or wrong, or a worker was started in a way that cannot be safe."""


class EagerModeError(ConfigurationError):
    """`task_always_eager` is on: use `durable.drain()` or the pytest fixture instead."""


class SchemaMismatch(ConfigurationError):
    """The ledger's schema is missing, too old or too new for this code."""


class DefinitionError(FixIt, TypeError):
    """A step or flow cannot be declared like this."""


class UnknownDefinition(FixIt, LookupError):
    """This process has no step or flow of that name."""


class UnknownRun(FixIt, LookupError):
    """There is no run with this id in this app's namespace."""


class UnknownWait(FixIt, LookupError):
    """There is no wait with this id in this app's namespace."""


class NotInRun(FixIt, RuntimeError):
    """A step or a verb of `flow` was called outside a run."""


class NotAllowedHere(FixIt, RuntimeError):
    """The call is not possible from this place (another thread, inside a step, in a flow's body)."""


class NondeterminismError(FixIt, RuntimeError):
    """The flow's code asked for another step than its history holds."""


class IdempotencyConflict(FixIt, ValueError):
    """An idempotency key was used again with other content."""


class PayloadError(FixIt, ValueError):
    """A value cannot be stored in the ledger."""


class ArgumentError(PayloadError, TypeError):
    """Arguments do not fit the signature of the step or flow."""


class NotSerializable(PayloadError):
    """A value does not survive encoding; the message names where."""


class PayloadTooLarge(PayloadError):
    """A value is larger than `durable_payload_limit`."""


class AskAPerson(DurableError):
    """Somebody has decided already, or has to decide."""


class AlreadyDecided(AskAPerson):
    """A second decision on the same wait."""


class VerdictRefused(AskAPerson):
    """The verdict cannot be known to be true yet; `force=True` takes the responsibility."""


class WrongState(AskAPerson):
    """The run or the wait is in a state that does not allow this verb."""


class Ended(DurableError):
    """How a step or a run ended, raised where its result was wanted."""


class StepFailed(Ended):
    """A step failed for good.

    Attributes:
        kind: the exception's class name, or a word of ours: "lost", "expired", "rejected", "verdict".
        message: its text.
        details: JSON-native facts (step, seq, attempts, traceback …).
    """

    def __init__(self, kind: str, message: str, details: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.message = message
        self.details = details or {}
        super().__init__(kind, message, self.details)

    def __str__(self) -> str:
        name = self.details.get("step")
        return f"{name}: {self.kind}: {self.message}" if name else f"{self.kind}: {self.message}"


class GatherFailed(Ended):
    """One or more branches of a `flow.gather` failed; the others' results are kept.

    Attributes:
        outcomes: one entry per branch, in order: its value, or the exception it raised.
    """

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        super().__init__(outcomes)

    def __str__(self) -> str:
        failures = [(i, o) for i, o in enumerate(self.outcomes) if isinstance(o, BaseException)]
        told = "; ".join(f"[{i}] {type(o).__name__}: {o}" for i, o in failures[:5])
        more = f" and {len(failures) - 5} more" if len(failures) > 5 else ""
        return f"{len(failures)} of {len(self.outcomes)} branches failed: {told}{more}"


class RunFailed(Ended):
    """The run failed.

    Attributes:
        kind, message, details: as in StepFailed.
    """

    def __init__(self, kind: str, message: str, details: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.message = message
        self.details = details or {}
        super().__init__(kind, message, self.details)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class RunCancelled(Ended):
    """The run was cancelled."""


class ControlSignal(BaseException):
    """Base of the signals that unwind a flow; never caught outside the engine's outermost loop."""


class Parked(ControlSignal):
    """The run waits; the flow unwinds and replays when what it waits for has come."""


class FenceLost(ControlSignal):
    """This process no longer owns the run or the step; what it was about to write was refused."""


class HandOver(ControlSignal):
    """The continuation stops between two steps and leaves the run to the next wake-up."""


class Cancelling(ControlSignal):
    """The run is being cancelled; the flow unwinds."""


class CodeMismatch(ControlSignal):
    """The run's history and this process's code disagree; the run parks until somebody acts.

    Attributes:
        error: the NondeterminismError or UnknownDefinition to show.
    """

    def __init__(self, error: DurableError) -> None:
        self.error = error
        super().__init__(str(error))
