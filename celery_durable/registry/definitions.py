"""Steps and flows as their authors declare them.

Owns names, options and signatures, checked when decorated. Knows how to be called: inside a run through
the conductor, outside through its home (the application). Never touches a ledger or a broker itself.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

from celery_durable.errors import ConfigurationError, DefinitionError, NotAllowedHere, NotInRun
from celery_durable.payload import ArgumentsType, PayloadType
from celery_durable.registry import shared
from celery_durable.registry.context import Home, StepContext, current
from celery_durable.registry.effect import Effect
from celery_durable.registry.policy import FIVE_TIMES, ONCE, ExceptionTypes, RetryPolicy

if typing.TYPE_CHECKING:
    from uuid import UUID

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RunHandle(Protocol[R_co]):
    """A started run, as its caller sees it."""

    @property
    def id(self) -> UUID:
        """Id of the run."""
        ...

    def status(self) -> str:
        """State of the run: ready, running, parked, cancelling, completed, failed or cancelled."""
        ...

    def result(self, timeout: float | timedelta | None = None) -> R_co:
        """Wait for the end and return the result.

        Raises:
            RunFailed: the run failed.
            RunCancelled: it was cancelled.
            ResultTimeout: it has not ended after `timeout` (seconds or timedelta); it goes on.
        """
        ...

    def cancel(self, *, by: str) -> str:
        """Cancel the run; returns its state."""
        ...

    def retry(self, *, by: str) -> str:
        """Reopen a failed run, or wake one that was parked for code; returns its state."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """How one call or start differs from its definition.

    Attributes:
        idempotency_key: the same key and content start one run only.
        using: SQLAlchemy Connection or Session, or psycopg connection: the start joins its transaction.
        queue, priority: where the run (or the queued step) is published.
        eta: not before this moment (aware datetime); kept in the ledger.
    """

    idempotency_key: str | None = None
    using: Any = None
    queue: str | None = None
    priority: int | None = None
    eta: datetime | None = None
    countdown: timedelta | None = None

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> Options:
        """Options from keywords, checked.

        Raises:
            TypeError: an unknown option or a value of the wrong type.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; known are {', '.join(names)}")
        options = dict(given)
        countdown = options.get("countdown")
        if isinstance(countdown, int | float) and not isinstance(countdown, bool):
            options["countdown"] = timedelta(seconds=countdown)
        _expect("idempotency_key", options.get("idempotency_key"), str)
        _expect("queue", options.get("queue"), str)
        _expect("priority", options.get("priority"), int)
        _expect("eta", options.get("eta"), datetime)
        _expect("countdown", options.get("countdown"), timedelta)
        if options.get("idempotency_key") == "":
            raise TypeError("idempotency_key must not be empty")
        eta = options.get("eta")
        if eta is not None and eta.tzinfo is None:
            options["eta"] = eta.replace(tzinfo=UTC)  # as Celery reads naive times with enable_utc
        return cls(**options)


def _expect(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: expected {kind.__name__}")


NO_OPTIONS = Options()


@dataclass(frozen=True, slots=True)
class Timer:
    """A durable timer as a branch of `gather` or `first`."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A step or flow with its arguments, not yet performed."""

    definition: Definition[..., R]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Options = NO_OPTIONS


class Definition(Generic[P, R]):
    """What steps and flows have in common: a name, a function, and ways to start it."""

    kind: typing.ClassVar[str]

    def __init__(self, fn: Callable[..., R], *, name: str | None, aliases: tuple[str, ...] = ()) -> None:
        _plain_function(fn, self.kind)
        self.fn: Callable[..., R] = fn
        self.name = name or f"{fn.__module__}.{fn.__name__}"
        self.aliases = tuple(aliases)
        self.queue: str | None = None
        self.priority: int | None = None
        self._home: Home | None = None
        hints = _hints(fn)
        signature = inspect.signature(fn)
        first = next(iter(signature.parameters.values()), None)
        self.wants_context = (
            self.kind == "step" and first is not None and hints.get(first.name) is StepContext
        )
        self.arguments = ArgumentsType(signature, hints, skip=int(self.wants_context), function=self.name)
        self.result: PayloadType[R] = PayloadType.of(hints.get("return", Any))
        self.__name__ = fn.__name__
        self.__qualname__ = fn.__qualname__
        self.__module__ = fn.__module__
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    @property
    def home(self) -> Home:
        """The application that starts runs of this definition.

        Raises:
            ConfigurationError: a shared definition, and no `Durable(app)` yet.
        """
        home = self._home or shared.home()
        if home is None:
            raise ConfigurationError(f"{self!r} belongs to no app yet: create `Durable(app)` first")
        return home

    def bind(self, home: Home) -> None:
        """Tell the definition which application it belongs to."""
        self._home = home

    @property
    def task(self) -> Any:
        """The Celery task of this name. Running it starts a run."""
        return self.home.celery_task(self)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call as a branch for `flow.gather` or `flow.first`."""
        return Call(self, args, kwargs)

    def start(self, *args: P.args, **kwargs: P.kwargs) -> RunHandle[R]:
        """Start a run; inside a flow, a recorded child run.

        Raises:
            ArgumentError: the arguments do not fit the signature.
            PayloadTooLarge: they are over `durable_payload_limit`.
            LedgerUnavailable: Postgres cannot be reached; nothing was started.
            EagerModeError: the app is in eager mode.
        """
        return _start(Call(self, args, kwargs))

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> RunHandle[R]:
        """The same as `start`."""
        return _start(Call(self, args, kwargs))

    def apply_async(
        self, args: typing.Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> RunHandle[R]:
        """Start a run with Celery's way to pass arguments; `countdown` and `eta` are durable timers.

        Raises:
            TypeError: an option of Celery's that a durable run does not have (`link`, `expires`, …).
        """
        return _start(Call(self, tuple(args or ()), dict(kwargs or {}), Options.known(options)))

    def options(self, **options: Any) -> Bound[P, R]:
        """The definition with options for one call or start (see Options).

        Raises:
            TypeError: an unknown option or a value of the wrong type.
        """
        return Bound(self, Options.known(options))

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """A Celery signature that starts a run and returns its id; a chain does not wait for its end."""
        return self.task.s(*args, **kwargs)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `s`, immutable."""
        return self.task.si(*args, **kwargs)

    signature = s

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Perform inside a run, recorded.

        Raises:
            NotInRun: outside a run, or inside another step.
            StepFailed: the step failed for good (or a class listed in `raises`).
        """
        return self._perform(Call(self, args, kwargs))

    def _perform(self, call: Call[R]) -> R:
        conductor = current()
        if conductor is None or conductor.in_step:
            where = "outside a run" if conductor is None else "inside a step"
            raise NotInRun(
                f"{self!r} was called {where}. Call `{self.__name__}.fn(…)` for the plain function, "
                f"or `{self.__name__}.start(…)` for a run of its own."
            )
        result: R = conductor.call(call)
        return result


class Bound(Generic[P, R]):
    """A definition with options."""

    __slots__ = ("_definition", "_options")

    def __init__(self, definition: Definition[P, R], options: Options) -> None:
        self._definition = definition
        self._options = options

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call as a branch for `flow.gather` or `flow.first`."""
        return Call(self._definition, args, kwargs, self._options)

    def start(self, *args: P.args, **kwargs: P.kwargs) -> RunHandle[R]:
        """Start a run with these options; see Definition.start."""
        return _start(self.call(*args, **kwargs))

    delay = start

    def apply_async(
        self, args: typing.Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> RunHandle[R]:
        """As Definition.apply_async, on top of these options."""
        more = {f.name: v for f in fields(Options) if (v := getattr(self._options, f.name)) is not None}
        return self._definition.apply_async(args, kwargs, **{**more, **options})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Perform inside a run, recorded, with these options."""
        return self._definition._perform(self.call(*args, **kwargs))  # noqa: SLF001 - one class in two halves


def _start(call: Call[R]) -> RunHandle[R]:
    conductor = current()
    if conductor is not None and not conductor.in_step:
        if call.options.using is not None:
            raise NotAllowedHere("using= has no meaning inside a flow: the child is recorded with the flow's run")
        child = conductor.start(call)
        return typing.cast("RunHandle[R]", call.definition.home.run(child, call.definition))
    handle: RunHandle[R] = call.definition.home.start(call)
    return handle


class Flow(Definition[P, R]):
    """A plain function whose steps are recorded and which replays from rows."""

    kind = "flow"


Reconcile = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Everything that `durable.step(…)` takes besides names.

    Attributes:
        effect: transactional, at_most_once or idempotent.
        retry: attempts and their delays. Default: 5 attempts, 1 for at_most_once.
        timeout: longest time one attempt may take; such a step is always queued.
        settle_after: when an unanswered at_most_once attempt can no longer take effect.
        key_valid_for: how long the remote side honours the effect id; older attempts go in doubt.
        ambiguous: exceptions of at_most_once that leave the outcome unknown, besides the defaults.
        known_failures: exceptions that prove it was not executed; only these may retry at_most_once.
        raises: exception classes that reach the flow as themselves.
        queue, priority, rate_limit: Celery's; such a step is always queued.
    """

    effect: Effect = Effect.AT_MOST_ONCE
    retry: RetryPolicy | None = None
    timeout: timedelta | None = None
    settle_after: timedelta | None = None
    key_valid_for: timedelta | None = None
    ambiguous: ExceptionTypes = ()
    known_failures: ExceptionTypes = ()
    raises: ExceptionTypes = ()
    queue: str | None = None
    priority: int | None = None
    rate_limit: str | None = None

    def checked(self, name: str) -> Self:
        """The options with their defaults filled in.

        Raises:
            DefinitionError: a value or a combination that cannot be honoured.
        """
        try:
            effect = Effect(self.effect)
        except ValueError:
            known = ", ".join(repr(e.value) for e in Effect)
            raise DefinitionError(f"step {name}: effect={self.effect!r} is none of {known}") from None
        for option in ("timeout", "settle_after", "key_valid_for"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):
                raise DefinitionError(f"step {name}: {option}={value!r}: give a positive timedelta")
        for option in ("ambiguous", "known_failures", "raises"):
            _exceptions(name, option, getattr(self, option))
        if self.retry is not None and not isinstance(self.retry, RetryPolicy):
            raise DefinitionError(f"step {name}: retry={self.retry!r}: give a RetryPolicy")
        once = effect is Effect.AT_MOST_ONCE
        if once and self.retry is not None and self.retry.max_attempts > 1 and not self.known_failures:
            raise DefinitionError(
                f"step {name}: an at_most_once step retries only errors that prove it was not executed. "
                "Name them in known_failures=(…), or choose effect='idempotent' or 'transactional'."
            )
        if self.key_valid_for is not None and effect is not Effect.IDEMPOTENT:
            raise DefinitionError(f"step {name}: key_valid_for goes with effect='idempotent' only")
        if self.settle_after is not None and effect is Effect.TRANSACTIONAL:
            raise DefinitionError(f"step {name}: settle_after has no meaning for a transactional step")
        return replace(
            self,
            effect=effect,
            retry=self.retry or (ONCE if once else FIVE_TIMES),
            ambiguous=tuple(self.ambiguous),
            known_failures=tuple(self.known_failures),
            raises=tuple(self.raises),
        )


class Step(Definition[P, R]):
    """One recorded unit of work."""

    kind = "step"

    def __init__(
        self, fn: Callable[..., R], *, name: str | None, aliases: tuple[str, ...] = (), options: StepOptions
    ) -> None:
        super().__init__(fn, name=name, aliases=aliases)
        self.step_options = options.checked(self.name)
        self.effect = self.step_options.effect
        self.policy = self.step_options.retry or FIVE_TIMES
        self.queue = options.queue
        self.priority = options.priority
        self.writes_intent = (
            self.effect is Effect.AT_MOST_ONCE
            or self.policy.max_attempts == 1
            or self.step_options.key_valid_for is not None
        )
        # a limit or a place of its own: never in the process that reached it
        self.travels = bool(
            options.queue or options.priority is not None or options.timeout or options.rate_limit
        )
        self.reconcile_hook: Reconcile | None = None
        self.reconcile_wants_context = False

    def reconcile(self, hook: Reconcile) -> Reconcile:
        """Decorator: asked when an attempt's outcome is unknown.

        The hook takes the step's arguments (and a StepContext first, when annotated so) and returns
        Completed(value), NotExecuted() or Unknown().

        Raises:
            DefinitionError: not a plain function, or the step has one already.
        """
        _plain_function(hook, "reconcile hook")
        if self.reconcile_hook is not None:
            raise DefinitionError(f"{self!r} has a reconcile hook already")
        first = next(iter(inspect.signature(hook).parameters.values()), None)
        self.reconcile_hook = hook
        self.reconcile_wants_context = first is not None and _hints(hook).get(first.name) is StepContext
        return hook


def _plain_function(fn: object, what: str) -> None:
    if not callable(fn):
        raise DefinitionError(f"a {what} must be a function, not {fn!r}")
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise DefinitionError(f"{what} {fn.__name__} is `async def`: Celery tasks are synchronous; write a plain def")
    if inspect.isgeneratorfunction(fn):
        raise DefinitionError(f"{what} {fn.__name__} is a generator: return a value instead of yielding")
    if not hasattr(fn, "__name__"):
        raise DefinitionError(f"a {what} must be a named function, not {fn!r}")


def _exceptions(name: str, option: str, given: object) -> None:
    if not isinstance(given, list | tuple) or not all(
        isinstance(e, type) and issubclass(e, BaseException) for e in given
    ):
        raise DefinitionError(f"step {name}: {option}={given!r}: give a list or tuple of exception classes")


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Resolved annotations; names that cannot be resolved yet count as unannotated."""
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:  # noqa: BLE001 - a forward reference may fail in any way
        return dict(getattr(fn, "__annotations__", {}))
