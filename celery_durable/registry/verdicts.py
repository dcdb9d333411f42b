"""What a reconcile hook or a person says about an attempt whose outcome was unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Completed(Generic[T_co]):
    """The effect happened; `value` is what the step would have returned."""

    value: T_co


@dataclass(frozen=True, slots=True)
class NotExecuted:
    """The effect did not happen; the step may run again."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The hook cannot say; a person has to."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The step failed and is not to run again; `message` is what its flow sees in StepFailed."""

    message: str
    kind: str = "verdict"


Verdict = Completed[object] | NotExecuted | Unknown | Failed
