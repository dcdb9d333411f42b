"""Retries, and which exceptions leave an outcome unknown.

Pure: an exception and the attempts so far go in, a decision comes out. Writes nothing.
"""

from __future__ import annotations

import random
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from celery_durable.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Iterable

ExceptionTypes = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a failed step is tried again.

    Attributes:
        max_attempts: all attempts, the first and the lost ones too; at least 1.
        backoff: delay before the second attempt.
        factor: growth of the delay per further attempt.
        max_backoff: upper bound of the delay.
        jitter: share of the delay that is random, 0 to 1. The deadline is drawn once and committed.
        retry_on: exceptions worth another attempt.
        give_up_on: exceptions that never are; it wins over `retry_on`.
    """

    max_attempts: int = 5
    backoff: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    max_backoff: timedelta = timedelta(minutes=5)
    jitter: float = 0.1
    retry_on: ExceptionTypes = (Exception,)
    give_up_on: ExceptionTypes = ()

    def __post_init__(self) -> None:
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise DefinitionError(f"RetryPolicy(max_attempts={self.max_attempts!r}): give a whole number from 1")
        for name in ("backoff", "max_backoff"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or value < timedelta(0):
                raise DefinitionError(f"RetryPolicy({name}={value!r}): give a timedelta that is not negative")
        if self.factor < 1 or not 0 <= self.jitter <= 1:
            raise DefinitionError("RetryPolicy: factor is at least 1 and jitter between 0 and 1")

    def delay(self, attempt: int) -> timedelta:
        """Delay after the failed `attempt` (from 1), jitter included."""
        try:
            seconds = self.backoff.total_seconds() * self.factor ** (attempt - 1)
        except OverflowError:
            seconds = self.max_backoff.total_seconds()
        seconds = min(seconds, self.max_backoff.total_seconds())
        return timedelta(seconds=seconds * (1 + self.jitter * (random.random() - 0.5)))  # noqa: S311 - spread, no secret


ONCE = RetryPolicy(max_attempts=1)
FIVE_TIMES = RetryPolicy()

# The request certainly never left: nobody listened, or the name has no address.
NEVER_SENT: ExceptionTypes = (ConnectionRefusedError, socket.gaierror)

# Sent, or perhaps sent, without an answer: nobody can say.
_AMBIGUOUS: ExceptionTypes = (
    TimeoutError,
    ConnectionError,
    EOFError,
    SystemExit,
    KeyboardInterrupt,
    MemoryError,
)

# Of libraries that may be installed: looked up when the exception's module is loaded, never imported.
_AMBIGUOUS_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "http.client": ("RemoteDisconnected", "IncompleteRead", "BadStatusLine"),
    "requests.exceptions": ("Timeout", "ConnectionError", "ChunkedEncodingError"),
    "urllib3.exceptions": ("TimeoutError", "ProtocolError", "IncompleteRead"),
    "httpx": ("TimeoutException", "NetworkError", "RemoteProtocolError"),
    "botocore.exceptions": ("HTTPClientError", "ConnectionError", "IncompleteReadError"),
    "billiard.exceptions": ("SoftTimeLimitExceeded", "TimeLimitExceeded"),
}
_NEVER_SENT_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "requests.exceptions": ("ConnectTimeout",),
    "urllib3.exceptions": ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError"),
    "httpx": ("ConnectError", "ConnectTimeout", "PoolTimeout"),
    "botocore.exceptions": ("EndpointConnectionError", "ConnectTimeoutError"),
}


def _loaded(table: dict[str, tuple[str, ...]]) -> ExceptionTypes:
    found = []
    for module, names in table.items():
        loaded = sys.modules.get(module)
        if loaded is not None:
            found += [cls for name in names if isinstance(cls := getattr(loaded, name, None), type)]
    return tuple(found)


def _causes(exc: BaseException) -> Iterable[BaseException]:
    """The exception, what it was raised from, and the reasons that HTTP libraries carry as arguments."""
    seen: set[int] = set()
    todo: list[object] = [exc]
    while todo:
        this = todo.pop()
        if not isinstance(this, BaseException) or id(this) in seen:
            continue
        seen.add(id(this))
        yield this
        todo += [this.__cause__, this.__context__, getattr(this, "reason", None), *this.args]


def never_sent(exc: BaseException) -> bool:
    """Whether the exception proves that no request left this process."""
    return isinstance(exc, NEVER_SENT + _loaded(_NEVER_SENT_ELSEWHERE)) or (
        isinstance(exc, _loaded({"requests.exceptions": ("ConnectionError",)}))
        and any(isinstance(e, NEVER_SENT + _loaded(_NEVER_SENT_ELSEWHERE)) for e in _causes(exc))
    )


def is_ambiguous(exc: BaseException, *, ambiguous: ExceptionTypes, known_failures: ExceptionTypes) -> bool:
    """Whether the exception leaves open if the effect happened.

    `known_failures` (the step's own word) wins over `ambiguous`, and both over the defaults.
    """
    if isinstance(exc, known_failures):
        return False
    if isinstance(exc, ambiguous):
        return True
    if never_sent(exc):
        return False
    return isinstance(exc, _AMBIGUOUS + _loaded(_AMBIGUOUS_ELSEWHERE))
