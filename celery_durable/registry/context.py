"""Who runs the code that is being executed: the seam between definitions and the engine.

A context variable holds the conductor of the current run. Definitions and verbs call it; the engine
implements it. Nothing here knows of a ledger or a broker.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from celery_durable.errors import NotInRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from celery_durable.registry.definitions import Call, Definition, Timer


class Conductor(Protocol):
    """What a definition or a verb of `flow` may ask of the run it is called in."""

    @property
    def in_step(self) -> bool:
        """Whether a step of the run is being executed right now."""
        ...

    def call(self, call: Call[Any]) -> Any:
        """Perform one call as a recorded step or child and return its result."""
        ...

    def start(self, call: Call[Any]) -> UUID:
        """Start a recorded child run and return its id without waiting."""
        ...

    def gather(self, calls: Sequence[Call[Any] | Timer]) -> list[Any]:
        """Perform calls in parallel; results in order."""
        ...

    def first(self, calls: Sequence[Call[Any] | Timer]) -> tuple[int, Any]:
        """Perform calls in parallel; index and result of the first to settle."""
        ...

    def sleep(self, timer: Timer) -> None:
        """Wait, parked, until the timer is due."""
        ...

    def record(self, name: str, make: Callable[[], Any], annotation: Any) -> Any:
        """Read a value once and return the same ever after."""
        ...

    def patched(self, patch_id: str) -> bool:
        """Whether this run takes the new side of a change of code."""
        ...


_current: ContextVar[Conductor | None] = ContextVar("celery_durable_conductor", default=None)


def current() -> Conductor | None:
    """The conductor of the run this code is called in, if any."""
    return _current.get()


def require(what: str) -> Conductor:
    """The conductor, or NotInRun that says what to do instead.

    Raises:
        NotInRun: outside a run.
    """
    conductor = _current.get()
    if conductor is None:
        raise NotInRun(f"{what} works only inside a flow's run. Start the flow with `.start(…)`.")
    return conductor


def enter(conductor: Conductor) -> Callable[[], None]:
    """Make `conductor` current; call what it returns to undo that."""
    token = _current.set(conductor)
    return lambda: _current.reset(token)


class StepContext:
    """What a step may know and do about itself; its first parameter, when annotated so.

    Attributes:
        run_id: id of the run.
        seq: position of the step in its run, from 1.
        attempt: which try this is, from 1.
        effect_id: stable id of the step, the same for every attempt; hand it to remote APIs as
            idempotency key.
        step: name of the step.
    """

    __slots__ = ("_backing", "attempt", "effect_id", "run_id", "seq", "step")

    def __init__(self, run_id: UUID, seq: int, attempt: int, step: str, backing: StepBacking) -> None:
        self.run_id = run_id
        self.seq = seq
        self.attempt = attempt
        self.effect_id = effect_id(run_id, seq)
        self.step = step
        self._backing = backing

    @property
    def connection(self) -> Connection:
        """The ledger's transaction as a SQLAlchemy Connection: what is written here commits with the step.

        Raises:
            NotAllowedHere: the step is not transactional.
        """
        return self._backing.connection()

    @property
    def session(self) -> Session:
        """An ORM Session on `connection`, made when first asked for. Its `commit()` releases a savepoint.

        Raises:
            NotAllowedHere: the step is not transactional.
        """
        return self._backing.session()

    def heartbeat(self) -> None:
        """Say that the step is alive, and learn whether it still owns its run.

        A step that has lost its claim is unwound; nothing it still writes to the ledger would count.
        """
        self._backing.heartbeat()

    def remember(self, key: str, value: Any) -> Any:
        """Keep `value` under `key` across attempts, in a commit of its own; returns the first value kept.

        Raises:
            NotSerializable: the value is not JSON-native.
        """
        return self._backing.remember(key, value)


class StepBacking(Protocol):
    """What the engine puts behind a StepContext."""

    def connection(self) -> Connection: ...

    def session(self) -> Session: ...

    def heartbeat(self) -> None: ...

    def remember(self, key: str, value: Any) -> Any: ...


class Home(Protocol):
    """The application a definition belongs to."""

    def start(self, call: Call[Any]) -> Any:
        """Start a run from outside any run; returns its handle."""
        ...

    def run(self, run_id: UUID, definition: Definition[..., Any] | None = None) -> Any:
        """The handle of a run."""
        ...

    def celery_task(self, definition: Definition[..., Any]) -> Any:
        """The Celery task registered for a definition."""
        ...


def effect_id(run_id: UUID, seq: int) -> str:
    """Stable id of a step of a run, fit for an `Idempotency-Key` header."""
    return f"{run_id}-{seq}"
